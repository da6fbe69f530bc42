// What the page knows of each schedule. chunks: fewest and most stages per device; split: I and W instead of B;
// place: the device of each stage.

const SCHEDULES = {
  gpipe: {
    build: breadthFirst, chunks: [1, 1], split: false, place: loop,
    says: "All forwards, then all backwards. Every device keeps the activations of the whole batch.",
    source: "Huang et al. 2019, GPipe",
  },
  "1f1b": {
    build: (given) => inTurn(given, (behind) => behind), chunks: [1, 1], split: false, place: loop,
    says: "A backward as soon as there is one, then a forward. The same bubble as GPipe with far less memory.",
    source: "Narayanan et al. 2021, PipeDream-Flush",
  },
  eager_1f1b: {
    build: (given) => inTurn(given, (behind) => 2 * behind), chunks: [1, 1], split: false, place: loop,
    says: "1F1B with more forwards up front: links are paid once and not for every micro-batch, with more memory.",
    source: "Zhuang et al. 2023",
  },
  interleaved_1f1b: {
    build: (given) => grouped(given, [B], (d, group) => 2 * (given.devices - 1 - d) + (given.chunks - 1) * group),
    chunks: [2, 4], split: false, place: loop,
    says: "Several smaller stages per device, round and round: the ramps get shorter, the messages more.",
    source: "Narayanan et al. 2021, Megatron-LM",
  },
  looped_bfs: {
    build: breadthFirst, chunks: [2, 4], split: false, place: loop,
    says: "Several smaller stages per device, each for the whole batch at a time. As much memory as GPipe.",
    source: "Lamy-Poirier 2022, Breadth-First",
  },
  zb_h1: {
    build: (given) => zeroBubble(given, given.devices), chunks: [1, 1], split: true, place: loop,
    says: "The backward is split. Gradients of weights (W) wait for a gap, in the memory of 1F1B.",
    source: "Qi et al. 2024, Zero Bubble",
  },
  zb_h2: {
    build: (given) => zeroBubble(given, 2 * given.devices - 1), chunks: [1, 1], split: true, place: loop,
    says: "As zb_h1 with about twice the memory: more forwards up front leave no gap between steps.",
    source: "Qi et al. 2024, Zero Bubble",
  },
  interleaved_zb: {
    build: (given) => grouped(given, [I, W], (d, group) => given.devices - 1 - d + (given.chunks - 1) * group),
    chunks: [2, 4], split: true, place: loop,
    says: "Interleaved 1F1B with the backward split: short ramps, and W in the gaps.",
    source: "torch.distributed.pipelining",
  },
  zb_v: {
    build: zbV, chunks: [2, 2], split: true, place: fold,
    says: "Two stages per device in a V, so backwards start where forwards do: little bubble in little memory.",
    source: "Qi et al. 2024, Controllable Memory",
  },
  v_half: {
    build: vHalf, chunks: [2, 2], split: true, place: fold,
    says: "The V with about half of the memory of 1F1B, for a longer step.",
    source: "Qi et al. 2024, Controllable Memory",
  },
  v_min: {
    build: vMin, chunks: [2, 2], split: true, place: fold,
    says: "The V with about a third of the memory of 1F1B, for a longer step.",
    source: "Qi et al. 2024, Controllable Memory",
  },
  greedy: {
    build: greedy, chunks: [1, 4], split: true, place: fold,
    says: "No pattern: a free device takes the best of what can start, for these times and this memory limit.",
    source: "List scheduling",
  },
};
