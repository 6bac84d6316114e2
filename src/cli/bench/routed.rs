//! Routed layers: which routed linears run together, and which experts a batch's tokens are sent to.

use lorapool::adapter::{BaseModel, ExpertLinear, SiteId};
use lorapool::conformance::Dice;

/// The routed linears of one layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Number of experts.
    pub experts: u32,
    /// Linears that read the tokens' x: gate and up.
    pub of_tokens: Vec<ExpertLinear>,
    /// Linears that read rows of the experts' own: down.
    pub of_rows: Vec<ExpertLinear>,
}

/// A model's routed layers.
#[derive(Clone, Debug)]
pub struct Routed {
    /// In the order of the model.
    pub layers: Vec<Layer>,
    /// Experts that each token is sent to.
    pub top_k: u32,
}

/// What a batch of routed rows is made of, for the fewest bytes that a step can move.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Tokens.
    pub tokens: u64,
    /// Rows: tokens times experts a token.
    pub rows: u64,
    /// Different pairs of an adapter and an expert.
    pub pairs: u64,
    /// Rank of each pair.
    pub rank: u64,
}

impl Layer {
    /// All its linears.
    pub fn linears(&self) -> impl Iterator<Item = &ExpertLinear> {
        self.of_tokens.iter().chain(&self.of_rows)
    }

    /// Fewest bytes of a step: weights of the pairs in use and inputs read, outputs read and written, each once, all of
    /// `element` bytes an element.
    pub fn floor_bytes(&self, load: Load, element: u64) -> u64 {
        let input = |linears: &[ExpertLinear]| linears.first().map_or(0, |linear| linear.in_features as u64);
        let inputs = load.tokens * input(&self.of_tokens) + load.rows * input(&self.of_rows);
        let linear = |linear: &ExpertLinear| {
            let (inputs, outputs) = (linear.in_features as u64, linear.out_features as u64);
            load.pairs * load.rank * (inputs + outputs) + 2 * load.rows * outputs
        };
        (inputs + self.linears().map(linear).sum::<u64>()) * element
    }
}

impl Routed {
    /// Those of Qwen3-30B-A3B: gate and up in one.
    ///
    /// # Errors
    /// What is wrong with `top_k`.
    pub fn qwen3(layers: usize, top_k: Option<u32>) -> Result<Self, String> {
        let linear = |layer: usize, name: &str, in_features, out_features| {
            let site = SiteId::from_path(&format!("model.layers.{layer}.mlp.experts.{name}"));
            ExpertLinear { site, experts: 128, in_features, out_features }
        };
        let of = |layer| [linear(layer, "gate_up_proj", 2048, 1536), linear(layer, "down_proj", 768, 2048)];
        let linears: Vec<ExpertLinear> = (0..layers).flat_map(of).collect();
        Self::new(&linears, top_k.unwrap_or(8))
    }

    /// Those of a base, the first `layers` of its layers.
    ///
    /// # Errors
    /// What there is not, or is wrong with the experts of a token.
    pub fn of_base(base: &BaseModel, layers: usize, top_k: Option<u32>) -> Result<Self, String> {
        let linears: Vec<ExpertLinear> =
            base.experts().iter().filter(|linear| linear.site.layer < layers).cloned().collect();
        if linears.is_empty() {
            let which = if base.experts().is_empty() { "it" } else { "its first layers" };
            return Err(format!("{}: found no routed experts in {which} to time", base.source()));
        }
        let said = || base.experts_per_token().and_then(|count| u32::try_from(count).ok());
        let top_k = top_k.or_else(said).ok_or_else(|| {
            let what = "config.json has no num_experts_per_tok, expected it or --top-k N: how many experts a token has";
            format!("{}: {what}", base.source())
        })?;
        Self::new(&linears, top_k)
    }

    fn new(linears: &[ExpertLinear], top_k: u32) -> Result<Self, String> {
        let owner = |linear: &ExpertLinear| linear.site.path.rsplit_once('.').map(|(owner, _)| owner.to_owned());
        let mut layers = Vec::new();
        for list in linears.chunk_by(|a, b| owner(a) == owner(b)) {
            let (of_tokens, of_rows) = list.iter().cloned().partition(ExpertLinear::reads_tokens);
            let experts = list[0].experts as u32;
            if top_k > experts {
                return Err(format!(
                    "{top_k} experts a token (--top-k, or else num_experts_per_tok of config.json), expected at most {experts}, \
                     as many as {} has",
                    list[0].site.path
                ));
            }
            layers.push(Layer { experts, of_tokens, of_rows });
        }
        Ok(Self { layers, top_k })
    }

    /// All linears of all layers.
    pub fn linears(&self) -> impl Iterator<Item = &ExpertLinear> {
        self.layers.iter().flat_map(Layer::linears)
    }

    /// Each layer's experts of `tokens` tokens, by `seed`.
    pub fn draw(&self, tokens: u32, seed: u64) -> Vec<Routes> {
        // Not the numbers that the rows' adapters are drawn by.
        let mut dice = Dice::new(!seed);
        self.layers.iter().map(|layer| Routes::draw(&mut dice, tokens, layer.experts, self.top_k)).collect()
    }
}

/// The experts of a batch's tokens in one layer.
#[derive(Clone, Debug)]
pub struct Routes {
    /// `[tokens][top_k]`
    pub experts: Vec<u32>,
    of: u32,
    top_k: u32,
}

impl Routes {
    /// `top_k` different ones of `experts` for each token, all with the same chance.
    fn draw(dice: &mut Dice, tokens: u32, experts: u32, top_k: u32) -> Self {
        // However the deck lies, what is dealt from it is uniform.
        let mut deck: Vec<u32> = (0..experts).collect();
        let mut drawn = Vec::with_capacity((tokens * top_k) as usize);
        for _ in 0..tokens {
            for i in 0..top_k {
                let other = i + dice.below(experts - i);
                deck.swap(i as usize, other as usize);
                drawn.push(deck[i as usize]);
            }
        }
        Self { experts: drawn, of: experts, top_k }
    }

    /// Different pairs of an adapter and an expert, for tokens with these adapters.
    pub fn pairs(&self, slots: &[i32]) -> u64 {
        let tokens = self.experts.chunks(self.top_k as usize).zip(slots);
        let mut pairs: Vec<(i32, u32)> =
            tokens.flat_map(|(experts, slot)| experts.iter().map(|expert| (*slot, *expert))).collect();
        pairs.sort_unstable();
        pairs.dedup();
        pairs.len() as u64
    }

    /// Rows of each expert.
    pub fn counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.of as usize];
        self.experts.iter().for_each(|expert| counts[*expert as usize] += 1);
        counts
    }

    /// Rows sorted by expert, tokens in their order: the first row of each expert and the end of the last one's, and each
    /// row's place among the unsorted.
    pub fn sorted(&self) -> (Vec<u32>, Vec<u32>) {
        let mut places: Vec<u32> = (0..self.experts.len() as u32).collect();
        let expert = |place: u32| self.experts[place as usize];
        places.sort_by_key(|place| expert(*place));
        let first = |expert_: u32| places.partition_point(|place| expert(*place) < expert_) as u32;
        ((0..=self.of).map(first).collect(), places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokens_experts_differ_all_are_drawn_and_layers_draw_anew() {
        let routed = Routed::qwen3(2, None).unwrap();
        let routes = routed.draw(64, 3);
        assert_ne!(routes[0].experts, routes[1].experts);
        assert_eq!(routes[0].experts, routed.draw(64, 3)[0].experts);
        let mut seen = [false; 128];
        for token in routes[0].experts.chunks(8) {
            for (i, expert) in token.iter().enumerate() {
                assert!(!token[..i].contains(expert));
                seen[*expert as usize] = true;
            }
        }
        assert!(seen.iter().filter(|seen| **seen).count() > 110);
        // All of them, where a token has as many as there are.
        let mut all = Routed::qwen3(1, Some(128)).unwrap().draw(1, 0)[0].experts.clone();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..128));
        assert!(Routed::qwen3(1, Some(129)).unwrap_err().contains("--top-k"));
    }

    #[test]
    fn sorted_rows_are_each_experts_in_the_order_of_the_tokens() {
        let routes = Routes { experts: vec![2, 0, 3, 2, 0, 3], of: 5, top_k: 2 };
        let (first, places) = routes.sorted();
        assert_eq!(first, [0, 2, 2, 4, 6, 6]);
        assert_eq!(places, [1, 4, 0, 3, 2, 5]);
        assert_eq!(routes.counts(), [2, 0, 2, 2, 0]);
        assert_eq!(routes.pairs(&[7, 7, 7]), 3);
        assert_eq!(routes.pairs(&[7, 8, 7]), 5);
    }

    #[test]
    fn the_floor_counts_weights_by_the_pair_and_activations_once() {
        let layer = &Routed::qwen3(1, None).unwrap().layers[0];
        assert_eq!((layer.of_tokens.len(), layer.of_rows.len()), (1, 1));
        let load = Load { tokens: 3, rows: 24, pairs: 20, rank: 16 };
        let weights = 20 * 16 * (2048 + 1536 + 768 + 2048);
        let activations = 3 * 2048 + 24 * 768 + 2 * 24 * (1536 + 2048);
        assert_eq!(layer.floor_bytes(load, 2), 2 * (weights + activations));
    }
}
