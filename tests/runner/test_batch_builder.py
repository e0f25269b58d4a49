"""Where rows of a plan lie in the flattened batch, in plain numbers."""

import numpy as np
import torch

from cairn.kernels import reference
from cairn.kernels.staging import Readback, Staging, StepBuffers
from cairn.runner.batch_builder import BatchBuilder, MultimodalInputs, SlotTensors
from cairn.step import SAMPLED, Admit, DecodeRows, PrefillRow, Snapshot, StepPlan
from cairn.types import SamplingParams
from doubles.counted_device import counted_device

NO_PAGES = np.zeros(0, np.int32)


def prefill(slot, start, end, kv_write_from=0, tokens=None):
    """A row whose token at position p is p."""
    return PrefillRow(slot, start, np.arange(start, end) if tokens is None else np.array(tokens), kv_write_from)


def decodes(*rows):
    """Rows of (slot, position, token, kv_write_from)."""
    slots, positions, tokens, write_from = zip(*rows, strict=True)
    ints = (np.array(column, np.int32) for column in (slots, positions, write_from))
    slots, positions, write_from = ints
    return DecodeRows(slots, positions, np.array(tokens, np.int64), write_from)


def built(plan, inputs=None, last_tokens=()):
    staging = Staging()
    builder = BatchBuilder(plan, inputs or [None] * plan.num_seqs, reference, staging, continues=plan.decodes.continues)
    staging.send(torch.device("cpu"))
    slot_tensors = SlotTensors(1, 8, 4, torch.device("cpu"))
    slot_tensors.last_tokens[: len(last_tokens)] = torch.tensor(last_tokens)
    return builder.batch(slot_tensors)


def test_decode_rows_come_first_and_prefills_follow_one_another():
    plan = StepPlan(
        1,
        decodes=decodes((1, 40, 40, 0), (3, 9, 9, 0)),
        prefills=(prefill(0, 70, 100), prefill(2, 0, 66), prefill(4, 5, 6)),
    )
    batch = built(plan)
    assert batch.host.num_decodes == 2 and batch.host.num_seqs == 5 and batch.host.num_tokens == 99
    assert batch.tokens.tolist() == [40, 9, *range(70, 100), *range(66), 5]
    assert batch.positions.tolist() == [batch.tokens.tolist()] * 3
    host = {name: getattr(batch.host, name).tolist() for name in ("cu_seqlens", "slots", "seq_starts", "seq_lens")}
    assert host == {
        "cu_seqlens": [0, 1, 2, 32, 98, 99],
        "slots": [1, 3, 0, 2, 4],
        "seq_starts": [40, 9, 70, 0, 5],
        "seq_lens": [41, 10, 100, 66, 6],
    }
    for name, wanted in host.items():
        found = getattr(batch, name)
        assert found.dtype == torch.int32 and found.tolist() == wanted
        assert getattr(batch.host, name).dtype == np.int32


def test_keys_and_values_are_written_where_nobody_has_written_them():
    plan = StepPlan(1, decodes=decodes((1, 40, 7, 0), (2, 8, 7, 9)), prefills=(prefill(0, 60, 70, kv_write_from=66),))
    batch = built(plan)
    assert batch.kv_write_from.tolist() == batch.host.kv_write_from.tolist() == [0, 9, 66]


def test_snapshots_come_in_the_batchs_order_and_rise_within_a_row():
    snapshots = tuple(Snapshot(row, position, NO_PAGES) for row, position in ((1, 140), (0, 41), (1, 64), (2, 1)))
    plan = StepPlan(
        1, decodes=decodes((1, 40, 7, 0)), prefills=(prefill(0, 60, 140), prefill(2, 0, 10)), snapshots=snapshots
    )
    builder = BatchBuilder(plan, [None] * 3, reference, Staging(), continues=plan.decodes.continues)
    host = builder.host
    assert builder.snapshots == [snapshots[1], snapshots[2], snapshots[0], snapshots[3]]
    assert host.snapshot_seqs.tolist() == [0, 1, 1, 2]
    assert host.snapshot_offsets.tolist() == [1, 4, 80, 1]


def test_tokens_that_were_drawn_are_taken_from_their_slots():
    rows = decodes((2, 3, SAMPLED, 0), (0, 9, 5, 0), (1, 5, SAMPLED, 0))
    batch = built(StepPlan(1, decodes=rows, prefills=(prefill(3, 8, 10),)), last_tokens=[70, 71, 72])
    assert batch.tokens.tolist() == [72, 5, 71, 8, 9]


def test_images_have_vectors_and_positions_of_their_own():
    plan = StepPlan(1, decodes=decodes((0, 20, 20, 0)), prefills=(prefill(1, 0, 4, tokens=[3, -5, -5, 4]),))
    vectors = torch.arange(6.0).view(2, 3)
    positions = np.array([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 3]])
    batch = built(plan, [None, MultimodalInputs(positions, np.array([1, 2]), vectors)])
    assert batch.tokens.tolist() == [20, 3, 0, 0, 4]
    assert batch.positions.tolist() == [[20, 0, 1, 1, 2], [20, 0, 1, 1, 2], [20, 0, 1, 2, 3]]
    assert batch.multimodal_embeddings.rows.tolist() == [2, 3] and torch.equal(
        batch.multimodal_embeddings.values, vectors
    )


def test_an_empty_share_of_images_is_none():
    nothing = MultimodalInputs(np.array([[0], [0], [0]]), np.zeros(0, np.int64), torch.zeros(0, 3))
    assert built(StepPlan(1, prefills=(prefill(1, 0, 1),)), [nothing]).multimodal_embeddings is None


ARRAYS = [np.arange(5), np.zeros((2, 0), np.int32), np.array([[True, False]]), np.float32([1.5]), np.arange(9)[::3]]


def test_all_of_a_step_comes_over_in_one_piece():
    """Whatever its dtypes and shapes, and with nothing in it."""
    device, copies = counted_device()
    staging = Staging()
    staged = [staging.add(array) for array in ARRAYS]
    copies.take()
    staging.send(device)
    staging.send(device)
    assert copies.take() == (1, 0)
    for array, one in zip(ARRAYS, staged, strict=True):
        found = one.tensor.cpu().numpy()
        assert found.shape == array.shape and found.dtype == array.dtype and np.array_equal(found, array)


def test_on_the_host_a_step_has_its_arrays_themselves_unless_they_are_somebody_elses():
    received, staging = np.frombuffer(bytes(range(16)), np.int32), Staging()
    staged = [staging.add(array) for array in (*ARRAYS, received)]
    staging.send(torch.device("cpu"))
    for array, one in zip([*ARRAYS, received], staged, strict=True):
        assert np.array_equal(one.tensor.numpy(), array) and one.tensor.numpy().dtype == array.dtype
    assert staged[0].tensor.data_ptr() == ARRAYS[0].ctypes.data
    assert staged[-1].tensor.data_ptr() != received.ctypes.data


def test_all_that_a_step_gives_comes_back_in_one_piece():
    device, copies = counted_device()
    for place in (device, torch.device("cpu")):
        readback = Readback(StepBuffers(place))
        fetched = [readback.add(torch.from_numpy(np.ascontiguousarray(array)).to(place)) for array in ARRAYS]
        copies.take()
        readback.send()
        assert copies.take() == (0, int(place is device))
        readback.wait()
        for array, one in zip(ARRAYS, fetched, strict=True):
            assert np.array_equal(one.array, array) and one.array.dtype == array.dtype


def test_rows_behind_a_stop_token_do_not_advance_until_their_slot_is_admitted_anew():
    tensors, slots = SlotTensors(1, 4, 4, torch.device("cpu")), torch.tensor([0, 1, 2], dtype=torch.int32)

    def admit(*stops):
        staging = Staging()
        plan = StepPlan(
            1, admits=tuple(Admit(slot, (NO_PAGES,), SamplingParams(), stop_token_ids=stop) for slot, stop in stops)
        )
        write = tensors.stage_updates(plan, staging)
        staging.send(torch.device("cpu"))
        write()

    def advanced(last_tokens, tokens):
        tensors.last_tokens[:3] = torch.tensor(last_tokens)
        tensors.continue_rows(torch.tensor(tokens), slots)
        return tensors.advanced(slots.long()).tolist()

    admit((0, (7, 9)), (1, (7,)), (2, ()))
    assert advanced([5, 7, 7], [SAMPLED, SAMPLED, SAMPLED]) == [True, False, True]
    assert advanced([9, 5, 9], [SAMPLED, SAMPLED, SAMPLED]) == [False, False, True]
    admit((1, (7,)))
    assert advanced([5, 7, 7], [SAMPLED, 7, SAMPLED]) == [False, True, True]
