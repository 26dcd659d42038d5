//! Synthetic traces of training programs, derived from a model's shape and a seed. They test the
//! planner beyond the recorded traces.

use super::Trace;
use super::writer::Writer;

/// The kind of program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// The same sequence length in every step.
    Fixed,
    /// A different sequence length in every step.
    Varlen,
    /// Varlen, with every unit's parameters gathered before use and freed after.
    Sharded,
    /// Training steps with rounds of generation between them, whose caches grow token by token.
    TrainAndGenerate,
    /// Varlen with activations recomputed in backward.
    Checkpointed,
    /// Varlen with evaluations between steps: forward only, other batch sizes, no saved
    /// activations.
    TrainAndEvaluate,
    /// As TrainAndGenerate, but rows start and end at any time, and each has a cache that grows by
    /// doubling.
    TrainAndServe,
}

/// A model and a run of it.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The kind of program.
    pub program: Program,
    /// Transformer blocks.
    pub layers: u64,
    /// Width of the model.
    pub width: u64,
    /// Vocabulary.
    pub vocabulary: u64,
    /// Rows of a batch.
    pub batch: u64,
    /// Longest sequence.
    pub positions: u64,
    /// Training steps.
    pub steps: u64,
    /// Seed of the random lengths.
    pub seed: u64,
}

/// Small and large shapes of the programs.
pub const SHAPES: [Shape; 8] = {
    const fn shape(program: Program, sizes: [u64; 5], steps: u64, seed: u64) -> Shape {
        let [layers, width, vocabulary, batch, positions] = sizes;
        Shape {
            program,
            layers,
            width,
            vocabulary,
            batch,
            positions,
            steps,
            seed,
        }
    }
    [
        shape(Program::Fixed, [12, 768, 50304, 16, 1024], 60, 1),
        shape(Program::Fixed, [48, 1600, 50304, 8, 1024], 20, 2),
        shape(Program::Varlen, [24, 1024, 50304, 12, 1024], 60, 3),
        shape(Program::Varlen, [32, 4096, 128256, 2, 4096], 40, 4),
        shape(Program::Sharded, [32, 2048, 32000, 8, 2048], 50, 5),
        shape(Program::TrainAndGenerate, [12, 768, 50304, 16, 1024], 40, 6),
        shape(Program::TrainAndGenerate, [24, 2048, 32000, 8, 2048], 16, 7),
        shape(Program::Checkpointed, [40, 5120, 32000, 4, 2048], 50, 8),
    ]
};

impl Shape {
    /// A random program of plausible size.
    pub fn random(seed: u64) -> Self {
        let mut w = Writer::new(String::new(), seed);
        let mut one_of = |choices: &[u64]| choices[w.below(choices.len() as u64) as usize];
        let program = match one_of(&[0, 1, 2, 3, 4, 5, 6]) {
            0 => Program::Fixed,
            1 => Program::Varlen,
            2 => Program::Sharded,
            3 => Program::TrainAndGenerate,
            4 => Program::Checkpointed,
            5 => Program::TrainAndEvaluate,
            _ => Program::TrainAndServe,
        };

        Self {
            program,
            layers: one_of(&[6, 12, 20, 24, 28, 36]),
            width: one_of(&[384, 512, 768, 1152, 1536, 2048, 3200]),
            vocabulary: one_of(&[256, 8000, 32000, 50257, 128256]),
            batch: one_of(&[1, 2, 3, 4, 8, 13, 16]),
            positions: one_of(&[256, 512, 1024, 2048]),
            steps: one_of(&[10, 20, 40]),
            seed,
        }
    }

    /// The parameters of one block, in elements.
    fn block_params(&self) -> [u64; 12] {
        let w = self.width;
        [
            w,
            w,
            3 * w * w,
            3 * w,
            w * w,
            w,
            w,
            w,
            4 * w * w,
            4 * w,
            4 * w * w,
            w,
        ]
    }

    /// Generates the trace.
    pub fn trace(&self) -> Trace {
        let name = format!(
            "{:?}-{}x{}-v{}-b{}-t{}-seed{}",
            self.program,
            self.layers,
            self.width,
            self.vocabulary,
            self.batch,
            self.positions,
            self.seed
        );

        let mut w = Writer::new(name, self.seed);
        let shard = if self.program == Program::Sharded {
            8
        } else {
            1
        };

        let embedding = self.vocabulary * self.width;
        let mut params = vec![embedding, self.positions * self.width];
        for _ in 0..self.layers {
            params.extend(self.block_params());
        }
        for elems in &params {
            w.allocate(elems * 4 / shard);
        }
        let mut moments = false;
        let mut grads = Vec::new();

        for step in 0..self.steps {
            let length = match self.program {
                Program::Fixed => self.positions,
                _ => (self.positions / 4 + w.below(self.positions * 3 / 4)).next_multiple_of(8),
            };
            w.free_all(std::mem::take(&mut grads));
            grads = self.train_step(&mut w, length, shard);
            if !moments {
                for elems in &params {
                    w.allocate(elems * 4 / shard);
                    w.allocate(elems * 4 / shard);
                }
                moments = true;
            }
            for elems in &params {
                w.scratch(elems * 4 / shard);
            }
            if self.program == Program::TrainAndGenerate && step % 4 == 3 {
                self.generate(&mut w);
            }
            if self.program == Program::TrainAndEvaluate && step % 3 == 2 {
                self.evaluate(&mut w);
            }
            if self.program == Program::TrainAndServe && step % 4 == 3 {
                self.serve(&mut w);
            }
        }

        w.finish()
    }

    /// Forward and backward; returns the gradients, which stay live.
    fn train_step(&self, w: &mut Writer, length: u64, shard: u64) -> Vec<u32> {
        let tokens = self.batch * length;
        let row = tokens * self.width * 2;
        let recompute = self.program == Program::Checkpointed;
        let unit: u64 = self.block_params().iter().sum::<u64>() * 2;
        let inputs = w.allocate(tokens * 8);
        let mut saved: Vec<Vec<u32>> = Vec::new();

        for _ in 0..self.layers {
            let gathered = (shard > 1).then(|| w.allocate(unit));
            let kept = self.forward(w, row);
            if recompute {
                let input = w.allocate(row);
                w.free_all(kept);
                saved.push(vec![input]);
            } else {
                saved.push(kept);
            }
            gathered.into_iter().for_each(|g| w.free(g));
        }

        // Loss: logits in bf16 and fp32, then their gradient.
        let logits = w.allocate(tokens * self.vocabulary * 2);
        let wide = w.allocate(tokens * self.vocabulary * 4);
        w.free(logits);
        let probabilities = w.allocate(tokens * self.vocabulary * 4);
        w.free(wide);
        let gradient = w.allocate(tokens * self.vocabulary * 4);
        w.free(probabilities);
        let narrow = w.allocate(tokens * self.vocabulary * 2);
        w.free(gradient);
        let mut grads = vec![w.allocate(self.vocabulary * self.width * 4 / shard)];
        let mut flowing = w.allocate(row);
        w.free(narrow);

        while let Some(mut kept) = saved.pop() {
            let gathered = (shard > 1).then(|| w.allocate(unit));
            if recompute {
                w.free_all(kept);
                kept = self.forward(w, row);
            }
            let whole = (shard > 1).then(|| w.allocate(unit));
            while let Some(activation) = kept.pop() {
                w.scratch(row * (1 + w.bytes_of(activation) / row.max(1)));
                w.free(activation);
            }
            let next = w.allocate(row);
            w.free(flowing);
            flowing = next;
            if let Some(whole) = whole {
                grads.push(w.allocate(unit * 2 / shard));
                w.free(whole);
            } else {
                grads.extend(self.block_params().map(|elems| w.allocate(elems * 4)));
            }
            gathered.into_iter().for_each(|g| w.free(g));
        }

        w.free(flowing);
        w.free(inputs);
        grads
    }

    /// One block's forward; returns the activations kept for backward.
    fn forward(&self, w: &mut Writer, row: u64) -> Vec<u32> {
        let statistics = row / self.width * 2;
        let mut kept = vec![
            w.allocate(statistics),
            w.allocate(statistics),
            w.allocate(row),
        ];
        kept.push(w.allocate(3 * row));
        w.scratch(row);
        kept.push(w.allocate(row));
        kept.push(w.allocate(statistics));
        w.scratch(row);
        kept.push(w.allocate(row));
        kept.push(w.allocate(4 * row));
        kept.push(w.allocate(4 * row));
        w.scratch(row);
        kept.push(w.allocate(row));
        kept
    }

    /// Evaluation: forward passes that save no activations for backward.
    fn evaluate(&self, w: &mut Writer) {
        for _ in 0..2 + w.below(4) {
            let tokens = (1 + w.below(2 * self.batch)) * (8 + w.below(self.positions));
            let mut row = w.allocate(tokens * self.width * 2);
            for _ in 0..self.layers {
                let kept = self.forward(w, tokens * self.width * 2);
                let next = w.allocate(tokens * self.width * 2);
                w.free_all(kept);
                w.free(row);
                row = next;
            }
            w.scratch(tokens * self.vocabulary * 2);
            w.free(row);
        }
    }

    /// Serving: rows of random length, whose caches double when they are full.
    fn serve(&self, w: &mut Writer) {
        let mut rows: Vec<(u64, Vec<u32>)> = Vec::new();
        let most = 2 * self.batch;
        for _ in 0..8 * most {
            if rows.len() < most as usize && w.below(3) > 0 {
                let length = 1 + w.below(self.positions / 2);
                let cache = (0..self.layers)
                    .map(|_| w.allocate(length * self.width * 4))
                    .collect();
                rows.push((length, cache));
            } else if !rows.is_empty() {
                let at = w.below(rows.len() as u64) as usize;
                let (length, cache) = rows.swap_remove(at);
                if length < self.positions && w.below(4) > 0 {
                    let longer = cache.into_iter().map(|entry| {
                        let twice = w.allocate(2 * length * self.width * 4);
                        w.free(entry);
                        twice
                    });
                    let longer = longer.collect();
                    rows.push((2 * length, longer));
                } else {
                    w.free_all(cache);
                }
            }
            w.scratch(most * self.vocabulary * 4);
        }

        rows.into_iter().for_each(|(_, cache)| w.free_all(cache));
    }

    /// Generation: keys and values of every block grow by concatenation.
    fn generate(&self, w: &mut Writer) {
        let rows = self.batch * (1 + w.below(3));
        let prompt = 16 + w.below(self.positions / 2);
        let tokens = 16 + w.below(48);
        let bytes = |length: u64| rows * length * self.width * 2;
        let mut cache: Vec<u32> = (0..2 * self.layers)
            .map(|_| w.allocate(bytes(prompt)))
            .collect();
        for token in 1..=tokens {
            for entry in &mut cache {
                let longer = w.allocate(bytes(prompt + token));
                w.free(*entry);
                *entry = longer;
            }
            w.scratch(rows * self.width * 8);
            w.scratch(rows * self.vocabulary * 4);
        }
        w.free_all(cache);
    }
}
