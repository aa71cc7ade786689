"""The kit of the Hopper kernels of all ops; it imports no op.

A kernel declares roles (which warpgroups run which code), a `Storage` (shared memory with its
barriers) and a schedule, and `launch` runs it. Read `roles.py`, `rings.py` and `schedule.py`, then
`ops/linear_attention/mosaic_gpu/output.py`, the kernel to start from.

    tiles      tiles in shared memory: their layouts, heads in tiles, loads and stores by TMA
    products   WGMMA products, several in flight at once
    schedule   items, pieces and chunks: the work that each persistent block takes
    roles      the code and the registers of each warpgroup
    rings      slots and barriers whose arrival counts follow from the roles that use them
    eight_bits rows of float8, widened in registers
    masks      rows of a chunk that are set to 0
    scales     units of float16 operands
    assembly   inline PTX
    turns      warpgroups that issue their products in turn
    program    a program's roles, storage and outputs on the card, or interpreted

`docs/architecture.md` has the whole picture on one page. Kernels say `mosaic.multiply`.
"""

from ato_jax.mosaic.assembly import commit_to_warp as commit_to_warp
from ato_jax.mosaic.assembly import compute_first as compute_first
from ato_jax.mosaic.assembly import hidden_position as hidden_position
from ato_jax.mosaic.assembly import in_bf16_parts as in_bf16_parts
from ato_jax.mosaic.assembly import in_two_parts as in_two_parts
from ato_jax.mosaic.assembly import plus_zero as plus_zero
from ato_jax.mosaic.eight_bit_factors import in_eight_bits as in_eight_bits
from ato_jax.mosaic.eight_bit_factors import in_order_of_eight_bits as in_order_of_eight_bits
from ato_jax.mosaic.eight_bit_factors import transposed_bytes as transposed_bytes
from ato_jax.mosaic.eight_bits import F8 as F8
from ato_jax.mosaic.eight_bits import copy_eight_bits as copy_eight_bits
from ato_jax.mosaic.eight_bits import eight_bits as eight_bits
from ato_jax.mosaic.eight_bits import fill_with_ones as fill_with_ones
from ato_jax.mosaic.eight_bits import load_eight_bits as load_eight_bits
from ato_jax.mosaic.eight_bits import load_turned as load_turned
from ato_jax.mosaic.eight_bits import scaled as scaled
from ato_jax.mosaic.eight_bits import store_turned as store_turned
from ato_jax.mosaic.eight_bits import store_turned_rows as store_turned_rows
from ato_jax.mosaic.eight_bits import widen as widen
from ato_jax.mosaic.eight_bits import widen_rows as widen_rows
from ato_jax.mosaic.masks import keep_rows as keep_rows
from ato_jax.mosaic.masks import keep_rows_between as keep_rows_between
from ato_jax.mosaic.masks import kept as kept
from ato_jax.mosaic.masks import rows_within as rows_within
from ato_jax.mosaic.products import ALIKE as ALIKE
from ato_jax.mosaic.products import PARTS as PARTS
from ato_jax.mosaic.products import accumulate_all_while as accumulate_all_while
from ato_jax.mosaic.products import accumulate_while as accumulate_while
from ato_jax.mosaic.products import in_parts as in_parts
from ato_jax.mosaic.products import multiply as multiply
from ato_jax.mosaic.products import multiply_under as multiply_under
from ato_jax.mosaic.products import multiply_while as multiply_while
from ato_jax.mosaic.products import of_parts as of_parts
from ato_jax.mosaic.products import pairs_of_parts as pairs_of_parts
from ato_jax.mosaic.program import Body as Body
from ato_jax.mosaic.program import Flat as Flat
from ato_jax.mosaic.program import Grid as Grid
from ato_jax.mosaic.program import Program as Program
from ato_jax.mosaic.program import launch as launch
from ato_jax.mosaic.program import refusal_of_device as refusal_of_device
from ato_jax.mosaic.rings import Array as Array
from ato_jax.mosaic.rings import Buffer as Buffer
from ato_jax.mosaic.rings import OneOf as OneOf
from ato_jax.mosaic.rings import Ring as Ring
from ato_jax.mosaic.rings import Signal as Signal
from ato_jax.mosaic.rings import Storage as Storage
from ato_jax.mosaic.rings import as_slot as as_slot
from ato_jax.mosaic.rings import await_the_last as await_the_last
from ato_jax.mosaic.rings import slot_of as slot_of
from ato_jax.mosaic.rings import wait_until_free as wait_until_free
from ato_jax.mosaic.roles import MEMORY_REGISTERS as MEMORY_REGISTERS
from ato_jax.mosaic.roles import REGISTERS as REGISTERS
from ato_jax.mosaic.roles import Role as Role
from ato_jax.mosaic.roles import Roles as Roles
from ato_jax.mosaic.roles import group as group
from ato_jax.mosaic.roles import set_registers as set_registers
from ato_jax.mosaic.roles import workers_registers as workers_registers
from ato_jax.mosaic.scales import has_units as has_units
from ato_jax.mosaic.scales import in_units as in_units
from ato_jax.mosaic.scales import unit_of as unit_of
from ato_jax.mosaic.scales import units_of_rows as units_of_rows
from ato_jax.mosaic.schedule import Deal as Deal
from ato_jax.mosaic.schedule import Item as Item
from ato_jax.mosaic.schedule import in_turn as in_turn
from ato_jax.mosaic.schedule import whole_chunks as whole_chunks
from ato_jax.mosaic.tiles import BF16 as BF16
from ato_jax.mosaic.tiles import F16 as F16
from ato_jax.mosaic.tiles import F32 as F32
from ato_jax.mosaic.tiles import HALF as HALF
from ato_jax.mosaic.tiles import OF_COLUMNS as OF_COLUMNS
from ato_jax.mosaic.tiles import OF_ROWS as OF_ROWS
from ato_jax.mosaic.tiles import ROWS as ROWS
from ato_jax.mosaic.tiles import TILE as TILE
from ato_jax.mosaic.tiles import Heads as Heads
from ato_jax.mosaic.tiles import Tiling as Tiling
from ato_jax.mosaic.tiles import Views as Views
from ato_jax.mosaic.tiles import for_copy as for_copy
from ato_jax.mosaic.tiles import in_columns as in_columns
from ato_jax.mosaic.tiles import in_rows as in_rows
from ato_jax.mosaic.tiles import load as load
from ato_jax.mosaic.tiles import load_transposed as load_transposed
from ato_jax.mosaic.tiles import ones as ones
from ato_jax.mosaic.tiles import rounded as rounded
from ato_jax.mosaic.tiles import store_in_memory as store_in_memory
from ato_jax.mosaic.tiles import store_transposed as store_transposed
from ato_jax.mosaic.tiles import times_rows as times_rows
from ato_jax.mosaic.tiles import zeros as zeros
from ato_jax.mosaic.turns import Turns as Turns
