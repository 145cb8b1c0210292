"""The loop: windows of micro-batches -> engine -> log -> evaluate -> checkpoint."""

from .metrics import MetricsLog, Progress
from .model.adapter import write_adapter


class Trainer:
    def __init__(self, run, engine):
        self.run, self.engine, self.config = run, engine, run.config
        self.step = 0

    def train(self) -> int:
        folder = self.run.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(self.config.dump_yaml(), "utf-8")
        progress = Progress(MetricsLog(folder / "metrics.jsonl"), self.run.schedule.total_steps)
        windows = self.run.batches.windows()
        while self.step < self.run.schedule.total_steps:
            window = next(windows)
            lr = self.run.schedule.lr(self.step)
            self.step += 1
            targets = self.engine.window(window.micro_batches, self.step, lr)
            progress.advance(window.tokens)
            if targets and self.step % self.config.logging_steps == 0:
                progress.logged(self.step, self.engine.loss_sum() / targets, lr, self.engine.grad_norm())
        write_adapter(folder, self.run.lora, self.engine.tensors(), self.run.checkpoint.name)
        progress.close()
        print(progress.summary())
        return 0
