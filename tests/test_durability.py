"""The store is the checkpoint: kills, faults of the disk, damage, crashes between any two operations, locks, resuming."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import crash
import packhorse as ph
import packhorse.trainer
from crash import STEPS, Positions, assert_equal, make_trainer, read_state, train
from packhorse.archive import check_store, describe_store, export_store, reclaim
from packhorse.errors import StoreError
from packhorse.memory import Ledger, Pool
from packhorse.store.encode import decode, encode
from packhorse.store.files import FileSystem, Lock
from packhorse.weights import SafetensorsFiles


@pytest.fixture(autouse=True, scope="module")
def _capture_once() -> Any:
    original = packhorse.trainer.capture
    crash.capture_once()
    yield
    packhorse.trainer.capture = original


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """All values after every step of an undisturbed run."""
    return crash.reference(tmp_path_factory.mktemp("reference"))


# -- kills


def run_kills(tmp_path: Path, kills: int, **options: Any) -> dict[str, int]:
    """In a process of its own, whose threads do not stand in the way of a fork."""
    program = (
        "import json, sys; from pathlib import Path; import crash; crash.capture_once();"
        "print(json.dumps(crash.kill_many(Path(sys.argv[1]), int(sys.argv[2]), **json.loads(sys.argv[3]))))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(kills), json.dumps(options)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("options", [{}, {"durability": "power", "clip_norm": 0.5}], ids=["process", "power, deferred"])
def test_killed_at_any_point(tmp_path: Path, options: dict[str, Any]) -> None:
    counts = run_kills(tmp_path, 16, **options)
    assert counts["killed by time"] + counts["killed in an operation"] >= 16


# -- faults


class Faulty(FileSystem):
    """Fails, or does only a part, at the given reads or writes of files whose name has `where` in it."""

    def __init__(self, fault: str, where: str, at: int):
        self.fault, self.where, self.left, self.armed = fault, where, at, False
        self.paths: dict[int, str] = {}

    def open(self, path: Path, **options: Any) -> int:
        descriptor = super().open(path, **options)
        self.paths[descriptor] = str(path)
        return descriptor

    def _due(self, descriptor: int) -> bool:
        if not self.armed or self.where not in self.paths[descriptor]:
            return False
        self.left -= 1
        return self.left == 0 or (self.left < 0 and self.fault.startswith("short"))

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.fault.endswith("read") and self._due(descriptor):
            if self.fault == "failing read":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            view = view[: max(len(view) // 8192 * 4096, 4096)]
        return super().read(descriptor, view, offset)

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.fault in ("disk full", "failing write", "short write") and self._due(descriptor):
            if self.fault != "short write":
                code = errno.ENOSPC if self.fault == "disk full" else errno.EIO
                raise OSError(code, os.strerror(code))
            view = view[: max(len(view) // 8192 * 4096, min(4096, len(view)))]
        return super().write(descriptor, view, offset)


def end_two_steps(trainer: ph.Trainer, batch: Any) -> None:
    """A deferred step may fail when the next one looks at it."""
    for _ in range(2):
        trainer.step(batch)
        trainer.state_dict()


@pytest.mark.parametrize("deferred", [False, True], ids=["eager", "deferred"])
@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.parametrize(
    ("fault", "where", "text"),
    [
        ("disk full", "exp_avg.bin", "No space left on device"),
        ("failing write", "master.bin", "Input/output error"),
        ("failing read", "master.bin", "Input/output error"),
        ("disk full", "manifest", "No space left on device"),
        ("failing write", "small", "Input/output error"),
    ],
)
def test_a_fault_loses_nothing(
    tmp_path: Path, expected: list[dict[str, Tensor]], fault: str, where: str, text: str, at: int, deferred: bool
) -> None:
    """The error names the file; the last step is there, in this process and for the next one."""
    options = {"update": "deferred"} if deferred else {}
    system = Faulty(fault, where, 1 if where in ("manifest", "small") else at)
    trainer = make_trainer(ph.DiskStore(tmp_path / "s", filesystem=system), **options)
    batches = iter(trainer.data)
    trainer.step(next(batches))
    trainer.step(next(batches))
    trainer.state_dict()  # ends what is under way
    system.armed = True
    batch = next(batches)
    with pytest.raises(StoreError, match=where) as failure:
        end_two_steps(trainer, batch)
    assert text in str(failure.value)
    system.armed = False
    shutil.copytree(tmp_path / "s", tmp_path / "copy")  # as another process would find it
    committed, values = read_state(tmp_path / "copy")
    assert_equal(values, expected[committed], "after the fault")
    with make_trainer(tmp_path / "copy", **options) as resumed:
        train(resumed)
    assert_equal(read_state(tmp_path / "copy")[1], expected[STEPS], "resumed")
    trainer.close()


@pytest.mark.parametrize("fault", ["short read", "short write"])
def test_short_operations_are_completed(tmp_path: Path, expected: list[dict[str, Tensor]], fault: str) -> None:
    system = Faulty(fault, ".bin", 1)
    system.armed = True
    with make_trainer(ph.DiskStore(tmp_path, filesystem=system)) as trainer:
        train(trainer)
    assert_equal(read_state(tmp_path)[1], expected[STEPS], fault)


def test_a_failed_step_can_be_repeated(tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    """In the same process: the batch whose step failed is given again."""
    system = Faulty("disk full", "exp_avg", 3)
    trainer = make_trainer(ph.DiskStore(tmp_path, filesystem=system))
    batches = list(zip(range(STEPS), Positions(), strict=False))
    for i, batch in batches:
        system.armed = i == 3
        if i == 3:
            with pytest.raises(StoreError, match="No space left") as failure:
                trainer.step(batch)
            assert any("as it was after step 3" in note for note in failure.value.__notes__)
            system.armed = False
        trainer.step(batch)
    trainer.close()
    assert_equal(read_state(tmp_path)[1], expected[STEPS], "repeated")


# -- damage


def committed_places(store: Path) -> list[tuple[Path, int, int]]:
    """Files and ranges of bytes that the last commit consists of."""
    opened = ph.DiskStore(store)
    manifest = opened.open_as_it_is(Pool(Ledger()))
    places = [(store / "manifest.json", 0), (opened.files.path / "header.json", 0)]
    places.append((store / f"small-{manifest['small']['number']}.safetensors", 0))
    found = [(path, start, path.stat().st_size) for path, start in places]
    for block in opened.files.blocks.values():
        for kind in block.kinds:
            offset = opened.files.offset(block, kind, opened.files.slot(block, kind, write=False))
            found.append((opened.files.path / f"{kind}.bin", offset, block.nbytes(kind)))
    opened.close()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("trained") / "s"
    with make_trainer(store) as trainer:
        train(trainer, 3)
    return store


def test_every_flipped_byte_is_found(trained: Path) -> None:
    random = Random(0)
    places = committed_places(trained)
    for _ in range(1000):
        path, start, size = random.choice(places)
        at, mask = start + random.randrange(size), 1 << random.randrange(8)
        flip(path, at, mask)
        try:
            _, problems = check_store(trained)
        except StoreError as error:
            problems = [str(error)]
        assert problems and path.name in problems[0], f"byte {at} of {path.name} is damaged, and nobody says so"
        flip(path, at, mask)
    assert check_store(trained)[1] == []


def flip(path: Path, at: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def test_a_damaged_block_stops_training(trained: Path, tmp_path: Path) -> None:
    """Never a wrong number: the run ends with the name of the block."""
    for i, (path, start, size) in enumerate(committed_places(trained)):
        copy = tmp_path / str(i)
        shutil.copytree(trained, copy)
        flip(copy / path.relative_to(trained), start + size // 3, 4)
        with pytest.raises(StoreError, match=f"{path.name}.* (is damaged|cannot be read)|block .*damaged"):
            resume_and_train(copy)


def resume_and_train(store: Path) -> None:
    with make_trainer(store) as trainer:
        train(trainer)


@pytest.mark.parametrize(
    "name", ["manifest.json", "small", "blocks-0/header.json", "blocks-0/master.bin", "blocks-0/exp_avg.bin"]
)
@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_missing_and_truncated_files(trained: Path, tmp_path: Path, name: str, how: str) -> None:
    copy = tmp_path / "s"
    shutil.copytree(trained, copy)
    if name == "small":
        name = next(path.name for path, _, _ in committed_places(copy) if path.name.startswith("small"))
    path = copy / name
    path.unlink() if how == "missing" else os.truncate(path, path.stat().st_size // 2)
    if name == "manifest.json" and how == "missing":
        return  # a directory without manifest is an empty store
    with pytest.raises(StoreError, match=path.name):
        make_trainer(copy)


# -- crashes between operations


class Recorder(FileSystem):
    """Notes every operation that changes something, with what it wrote."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []
        self.paths: dict[int, Path] = {}

    def open(self, path: Path, **options: Any) -> int:
        descriptor = super().open(path, **options)
        self.paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        count = super().write(descriptor, view, offset)
        self.operations.append(("write", self.paths[descriptor], bytes(view[:count]), offset))
        return count

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.operations.append(("sync", self.paths[descriptor]))

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self.operations.append(("replace", source, target))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.operations.append(("sync directory", path))


def record_step(tmp_path: Path, durability: Any) -> tuple[Path, list[tuple[Any, ...]]]:
    """A store after two steps, and the operations of the third."""
    recorder = Recorder()
    trainer = make_trainer(ph.DiskStore(tmp_path / "s", durability=durability, filesystem=recorder))
    train(trainer, 2)
    shutil.copytree(tmp_path / "s", tmp_path / "before")
    recorder.operations.clear()
    train(trainer, 3)
    operations = list(recorder.operations)
    trainer.close()
    return tmp_path / "before", operations


def replay(before: Path, target: Path, operations: list[tuple[Any, ...]], origin: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(before, target)
    for kind, path, *rest in operations:
        moved = target / path.relative_to(origin)
        if kind == "write":
            content, offset = rest
            with open(moved, "r+b" if moved.exists() else "w+b") as file:
                if not moved.name.endswith(".bin") and offset == 0:
                    file.truncate(0)
                file.seek(offset)
                file.write(content)
        elif kind == "replace" and moved.exists():
            os.replace(moved, target / rest[0].relative_to(origin))


def assert_old_or_new(store: Path, expected: list[dict[str, Tensor]], where: str) -> int:
    step, values = read_state(store)
    assert step in (2, 3), where
    assert_equal(values, expected[step], where)
    return step


def test_a_crash_between_any_two_operations(tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    before, operations = record_step(tmp_path, "process")
    found = []
    for count in range(len(operations) + 1):
        replay(before, tmp_path / "crashed", operations[:count], tmp_path / "s")
        found.append(assert_old_or_new(tmp_path / "crashed", expected, f"after {count} operations"))
    assert found == sorted(found) and found[0] == 2 and found[-1] == 3
    assert found.count(3) == 1, "only the last operation commits"


def test_power_loss_with_writes_dropped_and_reordered(tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    """What was not synced when the power went may have reached the disk or not, in any order, and torn."""
    before, operations = record_step(tmp_path, "power")
    random, seen = Random(0), Counter[int]()
    for count in range(len(operations) + 1):
        for _ in range(4):
            survivors = survive(operations[:count], random)
            replay(before, tmp_path / "crashed", survivors, tmp_path / "s")
            seen[assert_old_or_new(tmp_path / "crashed", expected, f"after {count} operations")] += 1
    assert seen[2] and seen[3]


def survive(operations: list[tuple[Any, ...]], random: Random) -> list[tuple[Any, ...]]:
    """Those that were synced, in order; of the others some, in any order, writes perhaps in part."""
    synced: set[int] = set()
    for i, (kind, path, *_) in enumerate(operations):
        if kind == "sync":
            synced |= {j for j in range(i) if operations[j][:2] == ("write", path)}
        elif kind == "sync directory":
            synced |= {j for j in range(i) if operations[j][0] == "replace"}
    kept = [operations[i] for i in sorted(synced)]
    loose = [
        operations[i] for i in range(len(operations)) if i not in synced and operations[i][0] in ("write", "replace")
    ]
    random.shuffle(loose)
    for operation in loose:
        if random.random() < 0.5:
            if operation[0] == "write" and random.random() < 0.5:
                operation = (*operation[:2], operation[2][: len(operation[2]) // 2], operation[3])
            kept.append(operation)
    return kept


# -- resuming


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "resident"},
        {"memory": "4GiB"},
        {"durability": "power"},
        {"durability": "none"},
        {"overlap": False},
    ],
    ids=str,
)
def test_another_way_of_running_goes_on_with_the_same_numbers(
    tmp_path: Path, expected: list[dict[str, Tensor]], options: dict[str, Any]
) -> None:
    with make_trainer(tmp_path) as trainer:
        train(trainer, 2)
    with make_trainer(tmp_path, **options) as trainer:
        train(trainer, 4)
    with make_trainer(tmp_path) as trainer:
        train(trainer)
    step, values = read_state(tmp_path)
    assert step == STEPS
    assert_equal(values, expected[STEPS], str(options))


def test_another_partition_lays_the_store_out_anew(
    tmp_path: Path, expected: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_trainer(tmp_path) as trainer:
        train(trainer, 2)
    cut = packhorse.trainer.partition
    with monkeypatch.context() as patch:
        patch.setattr(packhorse.trainer, "partition", lambda graph: cut(graph, 3))
        with make_trainer(tmp_path) as trainer:
            assert len(trainer._layout.blocks) == 2
            train(trainer, 4)
    assert [p.name for p in tmp_path.glob("blocks-*")] == ["blocks-1"]
    with make_trainer(tmp_path) as trainer:
        train(trainer)
    assert_equal(read_state(tmp_path)[1], expected[STEPS], "laid out twice")


def test_without_durability_only_a_closed_store_is_resumed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "s", durability="none")
    train(trainer, 2)
    shutil.copytree(tmp_path / "s", tmp_path / "crashed")
    trainer.close()
    with pytest.raises(StoreError, match="durability='none' and was not closed"):
        make_trainer(tmp_path / "crashed", durability="none")
    with make_trainer(tmp_path / "s", durability="none") as trainer:
        assert trainer.steps == 2


def test_a_store_in_use_names_its_holder(tmp_path: Path) -> None:
    with make_trainer(tmp_path) as trainer:
        train(trainer, 1)
        with pytest.raises(StoreError, match=rf"in use by process {os.getpid()} on .* since .*; wait until it ends"):
            make_trainer(tmp_path)
        assert f"process {os.getpid()}" in describe_store(tmp_path)["in_use_by"]
    assert describe_store(tmp_path)["in_use_by"] is None
    (tmp_path / "lock").write_text("process 999999 on elsewhere since long ago")  # left by one that was killed
    with make_trainer(tmp_path) as trainer:
        assert trainer.steps == 1


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal; from pathlib import Path; from packhorse.store.files import Lock;"
        "Lock(Path(sys.argv[1])).take(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "lock")], timeout=60)
    assert "process" in (tmp_path / "lock").read_text()
    Lock(tmp_path / "lock").take()


def test_a_loader_that_reads_ahead(tmp_path: Path) -> None:
    """Its position is read on entry of step(), so the batch after a resume is the next one."""

    class ReadsAhead(Positions):
        def __iter__(self) -> Any:
            waiting = deque[Any]()
            for batch in super().__iter__():
                waiting.append((batch, self.position))
                if len(waiting) > 2:
                    batch, self.given = waiting.popleft()
                    yield batch

        def state_dict(self) -> dict[str, int]:
            return {"position": getattr(self, "given", 0)}

    def run(steps: int) -> list[float]:
        model = crash.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = ReadsAhead()
        example = (torch.randn(6, 24), torch.randint(4, (6,)))
        losses = []
        with ph.Trainer(
            model, optimizer, example, loss=crash.classify, store=tmp_path, resume=True, data=data, microbatches=2
        ) as trainer:
            for batch in data:
                if trainer.steps >= steps:
                    break
                losses.append(trainer.step(batch))
        return losses

    interrupted = run(3) + run(5)
    shutil.rmtree(tmp_path)
    assert interrupted == run(5)


def test_what_cannot_be_committed_is_refused_at_the_start(tmp_path: Path) -> None:
    class Odd(Positions):
        def state_dict(self) -> Any:
            return {"position": 0, "file": open}

    model = crash.make_model()
    with pytest.raises(StoreError, match=r"data.state_dict\(\)\['file'\] is a builtins.builtin_function_or_method"):
        ph.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            (torch.randn(6, 24), torch.randint(4, (6,))),
            loss=crash.classify,
            store=tmp_path,
            data=Odd(),
        )


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


@given(values)
def test_encoded_values_come_back(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value, "value"))))
    assert found == value and type(found) is type(value)


def test_encoded_tensors_and_orders_come_back() -> None:
    for tensor in (torch.randn(3, 4), torch.tensor(True), torch.zeros(0, 2), torch.randn(3).bfloat16()):
        found = decode(json.loads(json.dumps(encode(tensor, "tensor"))))
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
    for other in (OrderedDict(b=1, a=2), deque([1, 2]), frozenset([3])):
        assert decode(json.loads(json.dumps(encode(other, "value")))) == other


# -- tools


def test_ls_check_export_gc(trained: Path, tmp_path: Path, expected: list[dict[str, Tensor]]) -> None:
    copy = tmp_path / "s"
    shutil.copytree(trained, copy)
    described = describe_store(copy)
    assert described["step"] == 3 and described["model"] == "Sequential" and described["closed"]
    count, problems = check_store(copy)
    assert count > described["bytes"]["master"] and not problems
    (copy / "blocks-7").mkdir()
    (copy / "manifest.json.new").write_text("half")
    assert reclaim(copy) > described["bytes_on_disk"] // 4
    assert not (copy / "blocks-7").exists() and check_store(copy)[1] == []
    export_store(copy, tmp_path / "out")
    with make_trainer(copy) as trainer:
        saved = trainer.save(tmp_path / "saved")
        assert [p.name for p in saved] == ["model.safetensors"]
        assert saved[0].read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
        train(trainer)
    assert_equal(read_state(copy)[1], expected[STEPS], "after gc")


def test_a_directory_that_is_no_store(tmp_path: Path) -> None:
    for tool in (describe_store, check_store, reclaim):
        with pytest.raises(StoreError, match=r"is no store: there is no manifest\.json"):
            tool(tmp_path)


class Tied(nn.Module):
    """A tied weight, a buffer that is not saved, a transposed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.outer = nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.odd = nn.Parameter(torch.randn(6, 8).t())
        self.register_buffer("scale", torch.ones(8), persistent=False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.outer(torch.relu(self.inner(x))) * self.scale @ self.odd)


@pytest.mark.parametrize("where", ["ram", "disk"])
@pytest.mark.parametrize("shard", [100, 1 << 30])
def test_save_and_load(tmp_path: Path, where: str, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor once, under its first name, in order of its dimensions; read again, all values are the same."""
    monkeypatch.setattr(packhorse.trainer, "capture", ph.capture)
    monkeypatch.setattr("packhorse.checkpoint.SHARD", shard)
    batch = (torch.randn(4, 8), torch.randn(4, 6))
    loss = lambda y, b: nn.functional.mse_loss(y, b[1])  # noqa: E731

    def make(store: Path | None, **options: Any) -> ph.Trainer:
        model = Tied()
        return ph.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batch, loss=loss, store=store, microbatches=2, **options
        )

    with make(tmp_path / "a" if where == "disk" else None) as trainer:
        trainer.step(batch)
        files = trainer.save(tmp_path / "saved")
        state = dict(trainer.state_dict())
        if where == "disk":
            trainer.close()
            export_store(tmp_path / "a", tmp_path / "exported")
            for file in files:
                assert file.read_bytes() == (tmp_path / "exported" / file.name).read_bytes()
    assert (tmp_path / "saved" / "model.safetensors.index.json").exists() == (shard == 100)
    found = {name: tensor.load() for name, tensor in SafetensorsFiles(tmp_path / "saved").items()}
    assert found.keys() == state.keys() - {"outer.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]), name
    with make(tmp_path / "b" if where == "disk" else None, weights=tmp_path / "saved") as again:
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, state[name]), name


def test_saving_beside_other_weights_is_refused(tmp_path: Path) -> None:
    with make_trainer(tmp_path / "s") as trainer:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "other.safetensors").write_bytes(b"")
        with pytest.raises(StoreError, match=r"already holds other\.safetensors"):
            trainer.save(tmp_path / "out")
