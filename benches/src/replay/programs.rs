//! Traces of programs that generate, serve, adapt, or train more than one model, made up from a model's shapes.
//! Many of them are at their peak all the time, which training is not. Everything follows from a seed.

use super::Trace;
use super::synth::{Program, Shape};
use super::writer::Writer;

/// What kind of program is imitated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Keys and values of every layer grow by concatenation, one token at a time, and nothing else lives.
    Caches,
    /// The same with weights and with what attention and the rest of a layer take for a moment.
    Generate,
    /// Generation that returns new caches from every step: the old ones are freed together, behind it.
    Returned,
    /// Generation with beams: every grown cache is copied again, in another order of rows.
    Beams,
    /// Generation with a draft of some tokens and a second model; caches grow by several tokens and are cut again.
    Speculative,
    /// Rows that begin and end at any time, each with caches of its own that grow by concatenation.
    Ragged,
    /// The same with caches of pages of 16 tokens.
    Paged,
    /// Every request has caches of its longest length from the start.
    Preallocated,
    /// An evaluation that collects all outputs in one block, by concatenation.
    Collected,
    /// Two models that train by turns, of which one feeds the other.
    Adversarial,
    /// Rounds of generation, scoring by other models, and training.
    Reinforced,
    /// Small adapters are trained, the model is frozen.
    Adapters,
}

/// A model and a run of it.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// What it does.
    pub kind: Kind,
    /// Transformer blocks.
    pub layers: u64,
    /// Width.
    pub width: u64,
    /// How many heads of queries share one of keys and values.
    pub grouped: u64,
    /// Rows of a batch.
    pub rows: u64,
    /// Tokens of a prompt, at most.
    pub prompt: u64,
    /// Tokens that are generated, or steps that are trained.
    pub tokens: u64,
    /// How often all of it is done.
    pub rounds: u64,
    /// Of the lengths.
    pub seed: u64,
}

/// A set of runs that covers all kinds, small and large.
pub const RUNS: [Run; 18] = {
    const fn run(kind: Kind, sizes: [u64; 7], seed: u64) -> Run {
        let [layers, width, grouped, rows, prompt, tokens, rounds] = sizes;
        Run { kind, layers, width, grouped, rows, prompt, tokens, rounds, seed }
    }
    [
        run(Kind::Caches, [6, 512, 1, 64, 256, 512, 2], 1),
        run(Kind::Caches, [24, 2048, 1, 8, 512, 512, 2], 2),
        run(Kind::Caches, [80, 8192, 8, 16, 2048, 256, 1], 3),
        run(Kind::Generate, [12, 768, 1, 16, 256, 512, 2], 4),
        run(Kind::Generate, [32, 4096, 4, 32, 1024, 512, 1], 5),
        run(Kind::Generate, [24, 1024, 1, 128, 64, 448, 1], 6),
        run(Kind::Returned, [12, 768, 1, 16, 256, 512, 2], 7),
        run(Kind::Returned, [6, 2048, 1, 64, 128, 512, 1], 8),
        run(Kind::Beams, [16, 1024, 1, 40, 128, 256, 2], 9),
        run(Kind::Speculative, [24, 2048, 1, 8, 512, 512, 1], 10),
        run(Kind::Ragged, [12, 768, 1, 16, 256, 384, 1], 11),
        run(Kind::Ragged, [28, 3072, 3, 12, 1024, 512, 1], 12),
        run(Kind::Paged, [12, 4096, 4, 16, 512, 512, 1], 13),
        run(Kind::Preallocated, [32, 4096, 4, 8, 1024, 256, 8], 14),
        run(Kind::Collected, [12, 768, 1, 8, 512, 400, 1], 15),
        run(Kind::Adversarial, [6, 64, 1, 32, 0, 200, 1], 16),
        run(Kind::Reinforced, [12, 768, 1, 16, 256, 64, 8], 17),
        run(Kind::Adapters, [32, 4096, 4, 4, 1024, 60, 1], 18),
    ]
};

const VOCABULARY: u64 = 32_000;

impl Run {
    /// Any run of any plausible size, as the seed has it.
    pub fn random(seed: u64) -> Self {
        let mut w = Writer::new(String::new(), seed);
        let kind = RUNS[w.below(RUNS.len() as u64) as usize].kind;
        let mut one_of = |choices: &[u64]| choices[w.below(choices.len() as u64) as usize];
        let (width, grouped) = (one_of(&[512, 768, 1024, 1600, 2048, 4096]), one_of(&[1, 1, 2, 4]));
        Self {
            kind,
            layers: one_of(&[4, 6, 12, 22, 32, 48]),
            width,
            grouped,
            rows: one_of(&[1, 2, 4, 7, 8, 16, 32, 64]),
            prompt: one_of(&[16, 100, 256, 1000]),
            tokens: one_of(&[64, 200, 512]),
            rounds: one_of(&[1, 2, 4]),
            seed,
        }
    }

    /// Makes the trace.
    pub fn trace(&self) -> Trace {
        let Self { kind, layers, width, grouped, rows, prompt, tokens, rounds, seed } = *self;
        let name = format!("{kind:?}-{layers}x{width}g{grouped}-b{rows}-p{prompt}-t{tokens}x{rounds}-seed{seed}");
        let mut w = Writer::new(name, self.seed);
        if !matches!(self.kind, Kind::Caches | Kind::Adversarial) {
            self.weights(&mut w);
        }
        match self.kind {
            Kind::Ragged | Kind::Paged => self.serve(&mut w),
            Kind::Collected => self.collect(&mut w),
            Kind::Adversarial => self.adversarial(&mut w),
            Kind::Reinforced => self.reinforced(&mut w),
            Kind::Adapters => self.adapters(&mut w),
            _ => (0..self.rounds).for_each(|_| self.generate(&mut w)),
        }
        w.finish()
    }

    /// Bytes of the keys, or the values, of a layer.
    fn cache_bytes(&self, rows: u64, length: u64) -> u64 {
        rows * length * self.width / self.grouped * 2
    }

    fn weights(&self, w: &mut Writer) {
        w.take(VOCABULARY * self.width * 2);
        for _ in 0..self.layers {
            let square = self.width * self.width * 2;
            for bytes in [square, 2 * square / self.grouped, square, 4 * square, 4 * square, self.width * 2] {
                w.take(bytes);
            }
        }
    }

    /// What one layer takes for a moment, for `fresh` tokens of each row that look back on `length`.
    fn layer(&self, w: &mut Writer, rows: u64, fresh: u64, length: u64) {
        if self.kind == Kind::Caches {
            return;
        }
        let hidden = rows * fresh * self.width * 2;
        let queries = w.take(hidden);
        let repeated = (self.grouped > 1).then(|| [(); 2].map(|()| w.take(rows * length * self.width * 2)));
        let scores = w.take(rows * self.width.div_ceil(64) * fresh * length * 2);
        w.scratch(w.bytes_of(scores));
        w.give(scores);
        repeated.into_iter().flatten().for_each(|r| w.give(r));
        let mixed = w.take(hidden);
        w.give(queries);
        let up = w.take(4 * hidden);
        w.scratch(4 * hidden);
        w.give(up);
        w.give(mixed);
    }

    /// Logits of one token of every row, and the choice of the next.
    fn choose(&self, w: &mut Writer, rows: u64) {
        if self.kind == Kind::Caches {
            return;
        }
        let logits = w.take(rows * VOCABULARY * 2);
        let wide = w.take(rows * VOCABULARY * 4);
        w.scratch(rows * VOCABULARY * 4);
        w.give_all(vec![logits, wide]);
        w.scratch(rows * 8);
    }

    /// One batch from its prompt to its end.
    fn generate(&self, w: &mut Writer) {
        let prompt = self.prompt / 2 + w.below(self.prompt / 2 + 1).max(1);
        let capacity = match self.kind {
            Kind::Preallocated => prompt + self.tokens,
            _ => prompt,
        };
        let mut caches = Vec::new();
        for _ in 0..2 * self.layers {
            caches.push(w.take(self.cache_bytes(self.rows, capacity)));
            self.layer(w, self.rows, 1, prompt);
        }
        let (mut length, end) = (prompt, prompt + self.tokens);
        while length < end {
            let fresh = if self.kind == Kind::Speculative { 4 } else { 1 };
            length += fresh;
            self.step(w, &mut caches, fresh, length);
            let refused = if fresh > 1 { w.below(fresh) } else { 0 };
            if refused > 0 {
                length -= refused;
                caches.iter_mut().for_each(|c| w.replace(c, self.cache_bytes(self.rows, length)));
            }
            self.choose(w, self.rows);
        }
        w.give_all(caches);
    }

    /// All layers once; the caches are `length` tokens long then.
    fn step(&self, w: &mut Writer, caches: &mut [u32], fresh: u64, length: u64) {
        let bytes = self.cache_bytes(self.rows, length);
        let mut old = Vec::new();
        for pair in caches.chunks_mut(2) {
            for cache in pair {
                match self.kind {
                    Kind::Preallocated => {}
                    Kind::Returned => old.push(std::mem::replace(cache, w.take(bytes))),
                    _ => w.replace(cache, bytes),
                }
            }
            self.layer(w, self.rows, fresh, length);
        }
        w.give_all(old);
        if self.kind == Kind::Beams {
            caches.iter_mut().for_each(|cache| w.replace(cache, bytes));
        }
    }

    /// Rows of any length that begin and end at any time.
    fn serve(&self, w: &mut Writer) {
        let page = 16;
        let mut rows: Vec<(u64, u64, Vec<u32>)> = Vec::new();
        for _ in 0..self.tokens {
            if rows.len() < self.rows as usize && w.below(2) == 0 {
                let length = 1 + w.below(self.prompt);
                let blocks = if self.kind == Kind::Paged { length.div_ceil(page) } else { 1 };
                let tokens = if self.kind == Kind::Paged { page } else { length };
                let caches = (0..2 * self.layers * blocks).map(|_| w.take(self.cache_bytes(1, tokens))).collect();
                rows.push((length, length + 1 + w.below(self.prompt), caches));
            }
            for (length, _, caches) in &mut rows {
                *length += 1;
                if self.kind == Kind::Ragged {
                    caches.iter_mut().for_each(|c| w.replace(c, self.cache_bytes(1, *length)));
                } else if *length % page == 1 {
                    caches.extend((0..2 * self.layers).map(|_| w.take(self.cache_bytes(1, page))));
                }
            }
            let longest = rows.iter().map(|row| row.0).max().unwrap_or(1);
            (0..self.layers).for_each(|_| self.layer(w, rows.len() as u64, 1, longest));
            self.choose(w, rows.len() as u64);
            let (ended, going) = rows.into_iter().partition(|(length, end, _)| length >= end);
            rows = going;
            let ended: Vec<(u64, u64, Vec<u32>)> = ended;
            ended.into_iter().for_each(|(_, _, caches)| w.give_all(caches));
        }
    }

    fn collect(&self, w: &mut Writer) {
        let mut tokens = 0;
        let mut outputs = w.take(512);
        for _ in 0..self.tokens {
            let length = 1 + w.below(self.prompt);
            (0..self.layers).for_each(|_| self.layer(w, self.rows, length, length));
            tokens += self.rows * length;
            w.replace(&mut outputs, tokens * self.width * 2);
        }
        w.give(outputs);
    }

    /// Levels of twice the side and half the channels; the one model draws, the other judges.
    fn adversarial(&self, w: &mut Writer) {
        let (levels, width) = (self.layers.min(6), self.width.min(64));
        let channels = |level: u64| width << (levels - level);
        let picture = |level: u64| self.rows * channels(level) * (16 << (2 * level)) * 2;
        let mut owned = Vec::new();
        for _model in 0..2 {
            for level in 0..levels {
                let elems = 9 * channels(level) * channels(level + 1);
                owned.extend([elems * 4; 4].map(|bytes| w.take(bytes)));
            }
        }
        let draw = |w: &mut Writer| (0..=levels).map(|level| w.take(picture(level))).collect::<Vec<_>>();
        let judge = |w: &mut Writer| {
            let level = (0..=levels).rev();
            level.flat_map(|level| [w.take(picture(level)), w.take(picture(level) / 4)]).collect::<Vec<_>>()
        };
        let backward = |w: &mut Writer, mut kept: Vec<u32>| {
            let mut flowing = w.take(512);
            while let Some(activation) = kept.pop() {
                w.replace(&mut flowing, w.bytes_of(activation));
                w.give(activation);
            }
            w.give(flowing);
        };
        for _ in 0..self.tokens {
            let mut drawn = draw(w);
            let fake = drawn.pop();
            w.give_all(drawn);
            let real = w.take(picture(levels));
            let (of_real, of_fake) = (judge(w), judge(w));
            backward(w, of_fake);
            backward(w, of_real);
            w.give(real);
            fake.into_iter().for_each(|f| w.give(f));
            let (drawn, judged) = (draw(w), judge(w));
            backward(w, judged);
            backward(w, drawn);
        }
        w.give_all(owned);
    }

    fn training(&self) -> Shape {
        let Self { layers, width, rows, prompt, tokens, rounds, seed, .. } = *self;
        let (vocabulary, positions) = (VOCABULARY, prompt + tokens);
        let program = Program::Varlen;
        Shape { program, layers, width, vocabulary, batch: rows, positions, steps: rounds, seed }
    }

    /// The model in [`Run::weights`] is the reference; the one that learns comes with its gradients and moments.
    fn reinforced(&self, w: &mut Writer) {
        let policy = self.training();
        let learned: Vec<u64> = (0..self.layers).map(|_| 12 * self.width * self.width * 4).collect();
        let owned: Vec<u32> = learned.iter().flat_map(|&bytes| [bytes; 3]).map(|bytes| w.take(bytes)).collect();
        let mut grads = Vec::new();
        for _ in 0..self.rounds {
            self.generate(w);
            let length = self.prompt + w.below(self.tokens.max(1));
            for _scorer in 0..2 {
                (0..self.layers).for_each(|_| self.layer(w, self.rows, length, length));
            }
            for _ in 0..2 {
                w.give_all(std::mem::take(&mut grads));
                grads = policy.train_step(w, length, 1);
                learned.iter().for_each(|&bytes| w.scratch(bytes));
            }
        }
        w.give_all(owned);
    }

    fn adapters(&self, w: &mut Writer) {
        const RANK: u64 = 16;
        let model = self.training();
        let owned: Vec<u32> = (0..8 * self.layers).map(|_| w.take(RANK * self.width * 4)).collect();
        for _ in 0..self.tokens {
            let length = 1 + self.prompt / 4 + w.below(self.prompt);
            let (tokens, mut saved) = (self.rows * length, Vec::new());
            for _ in 0..self.layers {
                saved.extend(model.forward(w, tokens * self.width * 2));
                saved.push(w.take(tokens * RANK * 2));
            }
            let logits = w.take(tokens * VOCABULARY * 2);
            let wide = w.take(tokens * VOCABULARY * 4);
            w.scratch(tokens * VOCABULARY * 4);
            w.give_all(vec![logits, wide]);
            let mut flowing = w.take(tokens * self.width * 2);
            while let Some(activation) = saved.pop() {
                w.scratch(w.bytes_of(activation));
                w.give(activation);
                w.replace(&mut flowing, tokens * self.width * 2);
            }
            w.give(flowing);
            let gradients: Vec<u32> = (0..2 * self.layers).map(|_| w.take(RANK * self.width * 4)).collect();
            w.give_all(gradients);
        }
        w.give_all(owned);
    }
}
