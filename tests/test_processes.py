"""How programs of several processes are run: this file is one, too."""

from __future__ import annotations

import os
import sys

import pytest

from tests import processes

# The number of simulated devices tells the program what to do.
DEVICES = {2: "all end well", 3: "one fails", 4: "one does not say that all is alike"}


def test_all_end_well() -> None:
    processes.run("tests.test_processes", 2, devices=2)


@pytest.mark.parametrize("count", [3, 4])
def test_one_does_not(count: int) -> None:
    with pytest.raises(AssertionError) as error:
        processes.run("tests.test_processes", count, devices=count)
    for number in range(count):
        assert f"process {number}" in str(error.value)


def main(port: str, number: str) -> None:
    last = os.environ["XLA_FLAGS"].rpartition("=")[2]
    print(f"process {number} at {int(port)}, {DEVICES[int(last)]}")
    assert not (last == "3" and number == "1")
    if not (last == "4" and number == "1"):
        print(processes.ALL_ALIKE)
        print("and a warning at its end")


if __name__ == "__main__":
    main(*sys.argv[1:])
