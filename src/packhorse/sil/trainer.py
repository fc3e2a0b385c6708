"""`ph.SegmentedTrainer`: parts of a model trained apart, on synthetic labels where it is cut.

In: a model, an optimizer, batches `(x, y)`, how many parts. Out: the same model, trained. Parts train one after another, each
on what the one before it made of the training set, kept on disk; or all at once, in processes that share nothing but a seed,
later ones on made-up inputs first. One part at a time needs memory. Each is trained by `ph.Trainer`, by relay if need be.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from packhorse.checkpoint import Entry, write_checkpoint
from packhorse.errors import BatchError, BudgetError, PackhorseError, StoreError
from packhorse.graph import Size
from packhorse.keys import fold, random_seed
from packhorse.memory import Memory, PeakWatch, resident_bytes, settle
from packhorse.optimizer import Stepper
from packhorse.plan import Strategy, find_fingerprint
from packhorse.precision import Precision
from packhorse.ranks.shape import Ranks
from packhorse.ranks.world import alone, find_world
from packhorse.sil.apart import Tell, await_part, is_mine, run_apart
from packhorse.sil.choices import (
    check_batch_sizes,
    check_callable,
    check_choices,
    check_counts,
    check_device,
    check_directory,
    check_loader,
    check_ranks,
    check_rates,
)
from packhorse.sil.divide import divide
from packhorse.sil.home import Home, remove
from packhorse.sil.labels import Labels, Scheme, Site, check_labels, find_scheme, name_scheme, wants_activated
from packhorse.sil.parts import (
    LABEL,
    ByLabel,
    Loss,
    Part,
    find_logits,
    give_values,
    join,
    mean_cross_entropy,
)
from packhorse.sil.report import PROCESS, describe, show
from packhorse.sil.rows import Rows, RowsWriter
from packhorse.sil.source import Columns, Imitated, Loaded, Source, Stored, check_classes, take_apart
from packhorse.sil.standing import Phase, Progress, Standing
from packhorse.state import find_config
from packhorse.trainer import Trainer
from packhorse.weights import SafetensorsFiles, read_model, refill

Mode = Literal["sequential", "parallel"]
Batches = Iterable[tuple[Any, Tensor]]


class SegmentedTrainer:
    """Trains a classifier part by part. `example` is a batch `(x, y)`, such as the loaders yield."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        example: tuple[Any, Tensor],
        *,
        num_classes: int,
        parts: int | None = None,
        cuts: Sequence[str] = (),
        labels: str | Scheme = "readout",
        mode: Mode = "sequential",
        loss: Loss | None = None,
        scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None,
        rates: float | Sequence[float] | None = None,
        batch_sizes: int | Sequence[int] | None = None,
        refine: int = 1,
        noise: float = 0.3,
        strategy: Strategy = "auto",
        microbatches: int | None = None,
        precision: Precision = "fp32",
        memory: int | str | Memory | None = None,
        store: str | Path | None = None,
        resume: bool = False,
        device: str | torch.device | None = None,
        ranks: Ranks | None = None,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ):
        """`scheduler(optimizer, steps)` makes a part's LR scheduler; `rates` and `batch_sizes` are for all parts, or one each.

        `refine`: epochs of each later part on real inputs, after those on made-up ones (mode="parallel"). `noise`: by how many
        of their standard deviations the inputs of later parts are shaken while they train; they never change again, as they
        would in training end to end, and a part that sees the very same ones every epoch learns them by heart. `ranks`: how
        those of torchrun are arranged when all of them train the joined model (`recover`).
        """
        check_choices(mode, parts, cuts, num_classes, refine, noise, seed)
        check_callable("loss", loss, "of (output, classes)")
        check_callable("scheduler", scheduler, "of (optimizer, steps), that makes one")
        check_callable("progress", progress, "told of every step")
        if store is not None:
            check_directory("store", store)
        num_classes = int(num_classes)
        x, y = take_apart(example)
        check_classes(y, num_classes)
        self.model, self.optimizer, self.example = model, optimizer, (x, y)
        self.num_classes, self.mode, self.seed = num_classes, mode, seed
        self.refine, self.noise = int(refine), noise
        self.loss, self.scheduler, self.progress = loss or mean_cross_entropy, scheduler, progress
        self._options: dict[str, Any] = {
            "strategy": strategy,
            "microbatches": microbatches,
            "precision": precision,
            "memory": memory,
            "device": device,
        }
        scheme = find_scheme(labels)
        self._scheme = name_scheme(scheme)
        self._stepper = Stepper(optimizer, model)
        self.division = divide(
            model,
            self._stepper,
            x,
            y,
            self.loss,
            parts=parts,
            cuts=cuts,
            activated=wants_activated(scheme),
            precision=precision,
        )
        if self.division.num_scores < num_classes:
            raise PackhorseError(
                f"num_classes is {num_classes}, but the model's output has {self.division.num_scores} scores a row; it needs "
                "one for each class"
            )
        self.rates = check_rates(rates, self.num_parts)
        self.batch_sizes = check_batch_sizes(batch_sizes, self.num_parts)
        crossings = self.division.crossings
        sites = [Site(i, c.shape, num_classes, seed, c.is_map) for i, c in enumerate(crossings)]
        self.labels: list[Labels] = [scheme(site) for site in sites]
        for made, site, crossing in zip(self.labels, sites, crossings, strict=True):
            check_labels(made, site, crossing.dtype, imitates=mode == "parallel")
        self.standings = [self._describe(i) for i in range(self.num_parts)]
        for i, segment in enumerate(self.division.train.segments):
            if not any(name in self._stepper.groups for name in segment.parameters):
                raise PackhorseError(
                    f"part {i} ({', '.join(segment.modules)}) has no parameter in the optimizer; give it model.parameters()"
                )
        self._is_meta = any(p.is_meta for p in model.parameters())
        self._keeps = store is not None or self._is_meta or mode == "parallel"  # trained values, in files
        self._world = find_world()
        check_device(device, mode)  # not before ranks have theirs
        check_ranks(ranks, 1 if self._world is None else self._world.size)
        self._ranks = ranks
        self._home = Home(store, self._world)
        self._fits = 0  # that this object was asked for
        self._recovered: tuple[int, ...] = ()  # likewise: epochs of each training end to end
        self._open(resume)

    @property
    def num_parts(self) -> int:
        return self.division.num_parts

    @property
    def is_recovered(self) -> bool:
        """Whether the joined model has been trained end to end, by this process or one before it."""
        return bool(self._recovered or self._home.recovered)

    # -- the verbs

    def fit(self, loader: Batches, epochs: int | Sequence[int] = 1, *, only: int | None = None) -> None:
        """Trains all parts, and when called again, further. With resume=True the first call is the run's first, and so on.

        What an earlier process has finished is not done again. `only` one part, in this process: on machines that never talk
        each trains its own (mode="parallel"). Brought together in one store, with resume=True, `fit` goes on from there.
        """
        self._home.check_open()
        counts = check_counts(epochs, self.num_parts, "epochs")
        check_loader(loader)
        if only is not None:
            if self.mode != "parallel" or isinstance(only, bool) or only not in range(self.num_parts):
                raise PackhorseError(
                    f"only is {only}, expected one of {self.num_parts} parts, from 0 on, and mode='parallel'; here mode is "
                    f"{self.mode!r}"
                )
            self._train_apart(loader, counts, only, self._tell)
            return
        if self._is_parallel:
            run_apart(partial(self._train_apart, loader, counts), self.num_parts, self._tell)
        for i in range(self.num_parts):
            if is_mine(i):
                self._look_again(i)
                self._finish(i, loader, counts[i])
            else:
                await_part(i, partial(self._is_done, i))
                self._look_again(i)
        self._fits += 1

    @property
    def _is_parallel(self) -> bool:
        return self.mode == "parallel" and self.num_parts > 1

    def _finish(self, i: int, loader: Batches, epochs: int) -> None:
        """Of a fit, what has to wait for the part before: training on what it made; then handing on."""
        left = [(0, epochs)] if not self._is_parallel else [(1, self.refine)] if self._num_phases(i) > 1 else []
        left = [phase for phase in left if not self._is_trained(i, *phase)]
        if not left and self._is_done(i):
            return  # what it was made of may be gone
        with self._source(i, loader) as source:
            for phase in left:
                self._train(i, *phase, source, self._tell)
            self._hand_on(i, source)

    def _num_phases(self, i: int) -> int:
        """Of a part, in a fit: parts behind the first that train at once are refined."""
        return 2 if self._is_parallel and i and self.refine else 1

    def _is_done(self, i: int) -> bool:
        """With the fit that is under way, in whatever process."""
        if self._keeps:
            self.standings[i].load(self._home.place(i))
        return self.standings[i].fits > self._fits

    def recover(self, loader: Batches, epochs: int = 1) -> None:
        """Ordinary training of the joined model, end to end, by relay where the budget asks for it; by all ranks, if several.

        As with `fit`, the first call after resume=True is the run's first: once it is finished it is not done again.
        """
        self._home.check_open()
        (epochs,) = check_counts(epochs, 1, "epochs")
        check_loader(loader)
        number, before = len(self._recovered), sum(self._recovered)
        if number < len(self._home.recovered):  # its values were taken up when the run was
            if self._home.recovered[number] != epochs:
                raise StoreError(
                    f"the joined model was trained for {self._home.recovered[number]} epochs, but {epochs} are asked; give as "
                    "many as it had, or choose another store"
                )
            self._recovered += (epochs,)
            return
        place, weights = self._home.recovery(number), None
        if self._is_meta:
            weights = place / "joined"
            self.save(weights)
        loaded = Loaded(self.division, loader, self.num_classes, seed=self._seed(self.num_parts))
        with ExitStack() as stack:
            stack.enter_context(_hyper_parameters_stay(self.optimizer))
            trainer = stack.enter_context(
                self._make_trainer(
                    self.model,
                    self.optimizer,
                    join(*self.example),
                    ByLabel(self.loss),
                    place / "store",
                    self._phase_seed(self.num_parts, number),
                    scheduler=self._schedule(self.optimizer, loaded.count(), epochs),
                    weights=weights,
                    ranks=self._ranks,
                )
            )
            tell = self._teller(self.num_parts, "recover", epochs, loaded.count(), self._tell)
            _run(trainer, lambda epoch: (join(*pair) for pair in loaded.pairs(before + epoch)), epochs, tell)
            if self._keeps:
                trainer.save(place / "model")
            if trainer.plan.on_disk and not self._is_meta and self._world is None:
                trainer.load_into(self.model)
        self._recovered += (epochs,)
        if self._keeps:
            self._home.commit_recovery(epochs)
            if self._world is None or self._world.rank == 0:
                remove(place / "store")
                remove(place / "joined")
        if self._world is not None:  # each had a piece
            for i in range(self.num_parts):
                self._look_again(i)

    def evaluate(self, loader: Batches) -> float:
        """The accuracy of the joined model. `standings` then tell what each part's own output, read out, gets right."""
        check_loader(loader, once=True)
        right = count = 0
        with self._home.scratch() as scratch, ExitStack() as opened:
            source: Source = Loaded(self.division, loader, self.num_classes)
            for i in range(self.num_parts):
                rows = scratch / str(i)
                right, count = self._evaluate(i, source, None if i == self.num_parts - 1 else rows)
                if not count:
                    raise BatchError("the loader has no batch to evaluate")
                self.standings[i].accuracy = right / count
                if i < self.num_parts - 1:
                    source = Stored(opened.enter_context(Rows(rows)), self._rows)
        return right / count

    def _evaluate(self, i: int, source: Source, rows: Path | None) -> tuple[int, int]:
        """How many rows a part gets right, of how many; what it makes of them goes to `rows`."""
        right = count = 0
        with self._opened(i) as predict, ExitStack() as stack:
            writer = stack.enter_context(RowsWriter(rows)) if rows is not None else None
            for columns in source.as_they_are(0):
                made = predict(columns)
                found = self._find_classes(i, made)
                right += int((found == columns[self.division.label]).sum())
                count += len(found)
                if writer is not None:
                    writer.append(self._carry(i, columns, made))
        return right, count

    def save(self, directory: str | Path) -> list[Path]:
        """Writes the joined model as safetensors under its own names. Of several ranks all have to call it; one writes."""
        check_directory("directory", directory)
        if self._world is None:
            return self._write(directory)
        found: list[Path] | PackhorseError = []
        if self._world.rank == 0:
            try:
                found = self._write(directory)
            except PackhorseError as error:
                found = error
        found = self._world.share(found, 0)
        if isinstance(found, PackhorseError):
            raise found
        return found

    def _write(self, directory: str | Path) -> list[Path]:
        graph = self.division.train.graph
        stored = [*graph.parameters.values(), *(b for b in graph.buffers.values() if b.persistent)]
        values = self._read_values()
        unused = [t.name for t in stored if t.name not in values]
        fresh = dict(read_model(self.model, unused)) if unused else {}
        entries = [Entry(t.name, tuple(t.shape), t.dtype) for t in stored]

        def read(name: str) -> Iterator[Tensor]:
            yield (fresh[name] if name in fresh else values[name]()).detach().cpu().contiguous().flatten()

        return write_checkpoint(directory, entries, read, find_config(self.model))

    def describe(self) -> dict[str, Any]:
        """What each part is and took, beside the model in one piece."""
        return describe(self.division, self.standings, self.mode)

    def report(self) -> str:
        """The same for a person to read."""
        return show(self.division, self.standings, self.mode, self._scheme)

    def close(self) -> None:
        self._home.close()

    def __enter__(self) -> "SegmentedTrainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- training a part

    def _train_apart(self, loader: Batches, counts: Sequence[int], i: int, tell: Tell) -> None:
        """In a process of its own: the first part on real inputs, later ones on made-up ones."""
        loaded = Loaded(self.division, loader, self.num_classes, self.batch_sizes[i], self._seed(i))
        source: Source = loaded
        if i:
            source = Imitated(loaded, self.division.crossings[i - 1], self.labels[i - 1], self._seed(i))
        if not self._is_trained(i, 0, counts[i]):
            self._train(i, 0, counts[i], source, tell)

    def _number(self, i: int, phase: int) -> int:
        """Of a phase of this fit, among all that the part is trained in."""
        return self._fits * self._num_phases(i) + phase

    def _is_trained(self, i: int, phase: int, epochs: int) -> bool:
        standing, number = self.standings[i], self._number(i, phase)
        if number >= standing.phases:
            return False
        if standing.epochs[number] != epochs:
            raise StoreError(
                f"part {i} was trained for {standing.epochs[number]} epochs, but {epochs} are asked; give as many for it "
                "as it had, or choose another store"
            )
        return True

    def _train(self, i: int, phase: int, epochs: int, source: Source, tell: Tell) -> None:
        """One phase of this fit."""
        standing, number = self.standings[i], self._number(i, phase)
        settle()
        watch, before_bytes, started = PeakWatch(), resident_bytes(), time.perf_counter()
        part = self._make_part(i)
        optimizer = self._make_optimizer(i, part)
        schedule = self._schedule(optimizer, source.count(), epochs)
        role = part.packhorse_role
        loss = None if role.is_last else _LabelLoss(self.labels[i])
        place, before, rows = self._home.phase(i, number), self._epochs_before(i), 0

        def batches(epoch: int) -> Iterator[dict[str, Tensor]]:
            nonlocal rows
            for columns in source.batches(before + epoch):
                rows += len(columns[self.division.label])
                yield role.bind(columns)

        with (
            alone(),  # other ranks train other parts
            self._make_trainer(
                part,
                optimizer,
                self._example(part),
                loss,
                place / "store",
                self._phase_seed(i, number),
                scheduler=schedule,
            ) as trainer,
        ):
            standing.on_disk = trainer.plan.on_disk
            standing.expect(trainer.plan.estimate, before_bytes, sum(t.nbytes for t in self._example(part).values()))
            told = self._teller(i, "refine" if phase else "fit", epochs, source.count(), tell)
            standing.steps += _run(trainer, batches, epochs, told)
            if self._keeps:
                trainer.save(place / "model")
            if standing.on_disk and not self._is_meta:
                trainer.load_into(part)
        standing.rows += rows
        standing.seconds += time.perf_counter() - started
        grown = watch.read()
        standing.grown_bytes = grown if grown is None else max(grown, standing.grown_bytes or 0)
        standing.epochs, standing.recoveries = (*standing.epochs, epochs), len(self._home.recovered)
        if self._keeps:
            standing.save(self._home.place(i))
            remove(place / "store")
            remove(self._home.phase(i, number - 1))

    def _epochs_before(self, i: int) -> int:
        """Of earlier fits: this one's go on from there."""
        return sum(self.standings[i].epochs[: self._fits * self._num_phases(i)])

    def _hand_on(self, i: int, source: Source) -> None:
        """Runs all rows through a part that is trained, once, and keeps what later ones need."""
        standing = self.standings[i]
        if i < self.num_parts - 1:
            with self._opened(i) as predict, RowsWriter(self._home.rows(i)) as writer:
                for columns in source.as_they_are(sum(standing.epochs)):
                    writer.append(self._carry(i, columns, predict(columns)))
                if not writer.count:
                    raise BatchError(
                        f"part {i} is trained, but then the loader had no batch to make the next part's inputs of; give one "
                        "whose __iter__ begins anew, and resume"
                    )
            standing.stored_bytes = writer.nbytes
        standing.fits = self._fits + 1
        if self._keeps:
            standing.save(self._home.place(i))

    def _carry(self, i: int, columns: Columns, made: Tensor) -> Columns:
        known = {**columns, self.division.crossings[i].learned: made}
        return {name: known[name] for name in self.division.columns_after(i)}

    def _find_classes(self, i: int, made: Any) -> Tensor:
        """What an output stands for: the last part's by its largest score, another's by its labels' read-out."""
        if i == self.num_parts - 1:
            return find_logits(made).argmax(-1)
        return self.labels[i].scores(made).argmax(-1)

    @contextmanager
    def _source(self, i: int, loader: Batches) -> Iterator[Source]:
        size = self.batch_sizes[i]
        if i == 0:
            yield Loaded(self.division, loader, self.num_classes, size, self._seed(i))
            return
        size = Loaded(self.division, loader, self.num_classes, size).find_rows()
        with Rows(self._home.rows(i - 1)) as rows:
            yield Stored(rows, size, self._seed(i), self.division.crossings[i - 1].learned, self.noise)

    @property
    def _rows(self) -> int:
        """Of the example."""
        return self.division.train.graph.batch.rows

    def _seed(self, i: int) -> int:
        return fold(self.seed * 1009 + i)

    def _phase_seed(self, i: int, number: int) -> int:
        """Of what is random inside, such as dropout: another for each part, and each time it is trained."""
        return fold(random_seed(self.seed, number, "part", i))

    def _make_part(self, i: int) -> Part:
        """The part with its values: the model's own, or, of a model without any, those in files, or first ones."""
        part = Part(self.division, i)
        if self._is_meta:
            files = self._latest(i)
            given = {**dict(part.named_parameters()), **dict(part.named_buffers())}
            stored = SafetensorsFiles(files) if files is not None else {}
            give_values(part, ((name, stored[name].load()) for name in given if name in stored))
            with torch.random.fork_rng([]):
                torch.manual_seed(self._seed(i))
                first = read_model(self.model, [name for name in given if name not in stored])
                give_values(part, ((n, value if given[n].is_meta else value.clone()) for n, value in first))
        return part

    def _make_optimizer(self, i: int, part: Part) -> torch.optim.Optimizer:
        """The user's kind of optimizer, with its groups, over the parameters of one part."""
        groups: dict[int, list[nn.Parameter]] = {}
        for name, parameter in part.named_parameters():
            if name in self._stepper.groups:
                groups.setdefault(self._stepper.groups[name], []).append(parameter)
        chosen = self._stepper.read_groups()
        rate = {} if self.rates[i] is None else {"lr": self.rates[i]}
        for group in chosen:
            group.pop("initial_lr", None)  # of a schedule that is not this part's
        return self._stepper.over([{**chosen[g], **rate, "params": members} for g, members in groups.items()])

    def _schedule(self, optimizer: torch.optim.Optimizer, count: int | None, epochs: int) -> Any:
        if self.scheduler is None:
            return None
        if count is None:
            raise PackhorseError(
                "a scheduler needs to know how many steps there are, but the loader does not tell: give it __len__, and, where "
                "batch_sizes are others than its own, batch_size and a dataset, as a DataLoader has them"
            )
        return self.scheduler(optimizer, count * epochs)

    def _make_trainer(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        example: Any,
        loss: Any,
        store: Path,
        seed: int,
        **more: Any,
    ) -> Trainer:
        """In RAM if it fits the budget, else on disk, where there is one."""
        make = partial(Trainer, model, optimizer, example, loss=loss, seed=seed, **self._options, **more)
        if not self._home.lasts:
            return make()
        if self._options["strategy"] == "relay" or store.exists():
            return make(store=store, resume=True)
        try:
            return make()
        except BudgetError:
            return make(store=store, resume=True)

    def _example(self, part: Part) -> dict[str, Tensor]:
        """Columns of the right shapes; capture looks at nothing else."""
        graph = self.division.train.graph
        types = {value.name: value.type for value in graph.values}
        columns = {}
        for name in (*part.packhorse_role.columns, self.division.label):
            shape: Any = [size.at(self._rows) if isinstance(size, Size) else size for size in types[name].shape]
            columns[name] = torch.zeros(shape, dtype=types[name].dtype)
        return part.packhorse_role.bind(columns)

    @contextmanager
    def _opened(self, i: int) -> Iterator[Callable[[Columns], Any]]:
        """A part that is trained, as a function from columns to what it makes of them."""
        if self.standings[i].on_disk and self._is_meta:
            part = Part(self.division, i)
            role = part.packhorse_role
            plain = torch.optim.SGD(part.parameters())  # which keeps nothing beside the values
            loss = None if role.is_last else _LabelLoss(self.labels[i])
            with ExitStack() as stack:
                scratch = stack.enter_context(self._home.scratch())
                stack.enter_context(alone())
                trainer = stack.enter_context(
                    self._make_trainer(
                        part, plain, self._example(part), loss, scratch / "store", self.seed, weights=self._latest(i)
                    )
                )
                yield lambda columns: trainer.predict(_without_label(role.bind(columns)))
            return
        part = self._make_part(i)
        part.eval()
        with torch.no_grad():
            yield lambda columns: part(**_without_label(part.packhorse_role.bind(columns)))
        part.train()

    def _tell(self, progress: Progress) -> None:
        if self.progress is not None:
            self.progress(progress)

    def _teller(
        self, part: int, phase: Phase, epochs: int, count: int | None, tell: Tell
    ) -> Callable[[int, int, float], None]:
        """What tells of a step, if anybody listens."""
        if self.progress is None:
            return lambda epoch, step, loss: None
        steps = None if count is None else count * epochs
        return lambda epoch, step, loss: tell(Progress(part, self.num_parts, phase, epoch, epochs, step, steps, loss))

    # -- what is kept

    def _open(self, resume: bool) -> None:
        header = {
            "fingerprint": find_fingerprint(self.division.train.graph),
            "cuts": [cut.index for cut in self.division.train.cuts],
            "labels": self._scheme,
            "num_classes": self.num_classes,
            "mode": self.mode,
            "seed": self.seed,
            "noise": self.noise,
            "refine": self.refine,
            "optimizer": type(self.optimizer).__qualname__,
            "batch_sizes": self.batch_sizes,
        }
        if self._home.open(header, resume=resume):
            for i in range(self.num_parts):
                self._look_again(i)

    def _look_again(self, i: int) -> None:
        """What another process, or an earlier run, has made of a part."""
        if not self._keeps:
            return
        self.standings[i].load(self._home.place(i))
        files = self._latest(i)
        if not self._is_meta and files is not None:
            part, values = Part(self.division, i), SafetensorsFiles(files)
            with torch.no_grad():
                for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
                    if name in values:
                        refill(tensor, values[name].load())

    def _latest(self, i: int) -> Path | None:
        """The files that have a part's values: of its last phase, or of the whole model's training after that."""
        standing, recoveries = self.standings[i], len(self._home.recovered)
        if recoveries > standing.recoveries:
            return self._home.recovery(recoveries - 1) / "model"
        return self._home.phase(i, standing.phases - 1) / "model" if standing.phases else None

    def _read_values(self) -> dict[str, Callable[[], Tensor]]:
        """All trained values by name, read when asked for."""
        if not self._is_meta:
            tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
            return {name: partial(Tensor.detach, tensor) for name, tensor in tensors}
        found: dict[str, Callable[[], Tensor]] = {}
        for i in range(self.num_parts):
            files, part = self._latest(i), self.division.train.segments[i]
            if files is not None:
                stored = SafetensorsFiles(files)
                names = [n for n in (*part.parameters, *part.buffers) if n in stored]
                found |= {name: stored[name].load for name in names}
        return found

    def _describe(self, i: int) -> Standing:
        segment, graph = self.division.train.segments[i], self.division.train.graph
        crossing = 0
        if i < self.num_parts - 1:
            learned = self.division.crossings[i].learned
            crossing = next(v.nbytes for v in graph.values if v.name == learned) // self._rows
        return Standing(
            segment.modules,
            sum(torch.Size(graph.parameters[name].shape).numel() for name in segment.parameters),
            PROCESS + self.division.needs[i].planned,
            3 * segment.flops / self._rows,
            crossing,
        )


class _LabelLoss:
    """The loss of labels as `ph.Trainer` calls it."""

    def __init__(self, labels: Labels):
        self.labels = labels

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self.labels.loss(output, batch[LABEL])


def _without_label(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in arguments.items() if name != LABEL}


def _run(
    trainer: Trainer,
    batches: Callable[[int], Iterator[Any]],
    epochs: int,
    tell: Callable[[int, int, float], None],
) -> int:
    """All epochs, but for steps that a run that died had taken. How many steps that makes."""
    seen = 0
    for epoch in range(epochs):
        before = seen
        for batch in batches(epoch):
            seen += 1
            if seen > trainer.steps:
                tell(epoch, seen, trainer.step(batch))
        if seen == before:
            raise BatchError(
                f"the loader has no batch in epoch {epoch + 1} of {epochs}; give one that yields (x, y) every time"
            )
    return seen


@contextmanager
def _hyper_parameters_stay(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """What a schedule makes of them is not what is trained with next."""
    before = [dict(group) for group in optimizer.param_groups]
    tensors = [value for group in before for value in group.values() if isinstance(value, Tensor)]
    filled = [value.clone() for value in tensors]  # a schedule changes them in place
    try:
        yield
    finally:
        for group, kept in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(kept)
        for value, content in zip(tensors, filled, strict=True):
            value.copy_(content)
