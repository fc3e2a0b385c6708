"""transformers' models, unmodified: any partition is the module, in fp32 and in bf16."""

import pytest
import torch

import packhorse as ph
from reference import assert_partitions_same
from toys import HUGGING_FACE, hugging_face

pytest.importorskip("transformers", reason="transformers is an extra and not installed")


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_any_partition_is_the_model(name: str) -> None:
    model, make, _ = hugging_face(name)
    graph = ph.capture(model, make(4))
    assert not graph.opaque
    assert_partitions_same(model, graph, [make(4), make(3)])


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "mixtral"])
def test_bf16(name: str) -> None:
    model, make, _ = hugging_face(name, torch.bfloat16)
    graph = ph.capture(model, make(4))
    assert not graph.opaque
    assert_partitions_same(model, graph, [make(4), make(3)], counts=(1, 3, "finest"))


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
def test_unpadded_masks_keep_the_kernels_of_eager(name: str) -> None:
    model, make, _ = hugging_face(name)

    def masked(rows: int) -> dict[str, torch.Tensor]:
        return make(rows) | {"attention_mask": torch.ones(rows, 10, dtype=torch.long)}

    graph = ph.capture(model, masked(4))
    assert [guard.input for guard in graph.guards] == ["attention_mask"]
    assert_partitions_same(model, graph, [masked(3)], counts=(1, 3))
    padded = masked(4)
    padded["attention_mask"][0, -3:] = 0
    with pytest.raises(ph.BatchError, match="all ones in the example"):
        graph.inputs(padded)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_padded_masks_are_captured_and_carried(name: str) -> None:
    model, make, _ = hugging_face(name)

    def padded(rows: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(rows, 10, dtype=torch.long)
        mask[0, -3:] = 0
        return make(rows) | {"attention_mask": mask}

    graph = ph.capture(model, padded(4))
    assert not graph.guards and not graph.opaque
    assert_partitions_same(model, graph, [padded(4), padded(3)], counts=(1, 3))


def test_tied_weights_are_one_parameter_with_two_names() -> None:
    model, make, _ = hugging_face("gpt2")
    graph = ph.capture(model, make(2))
    assert graph.ties == {"transformer.wte.weight": ("transformer.wte.weight", "lm_head.weight")}
    first, *_, last = ph.partition(graph, 4).segments
    assert "transformer.wte.weight" in first.parameters and "transformer.wte.weight" in last.parameters
