// A tour: settings, and what to look at.

const LESSONS = [
  ["Cut the model", "Four devices hold a quarter of the model each, and the batch goes through in one piece. One device " +
    "works, three wait: the bubble is three quarters. Now give it more micro-batches.",
    { schedule: "gpipe", devices: 4, microbatches: 1 }],
  ["Cut the batch", "Eight micro-batches follow each other. What is left are the ramps at both ends, p−1 slots of " +
    "m+p−1. Double the micro-batches and watch the bubble, then look at the memory.",
    { schedule: "gpipe", devices: 4, microbatches: 8 }],
  ["1F1B", "The same bubble, but a backward runs as soon as it can and frees its activations. A device keeps at most as " +
    "many as there are devices after it, plus one, however many micro-batches there are.",
    { schedule: "1f1b", devices: 4, microbatches: 8 }],
  ["Smaller stages", "Each device holds two smaller stages, so a ramp takes half as long. The price: more messages, and " +
    "more activations. Try three and four stages per device, then a slow link.",
    { schedule: "interleaved_1f1b", devices: 4, microbatches: 8, chunks: 2 }],
  ["Split the backward", "Nobody waits for gradients of weights. Put off, they fill the gaps at the end. Make W longer " +
    "or shorter and watch where the gaps close.",
    { schedule: "zb_h1", devices: 4, microbatches: 8 }],
  ["Buy time with memory", "More forwards up front, about twice the activations. Here the span of each device, " +
    "from its first action to its last, has no gap: the next step could follow at once.",
    { schedule: "zb_h2", devices: 4, microbatches: 8 }],
  ["Fold it", "Stages go down the devices and back up. The first device also has the last stage, so backwards " +
    "start where forwards do. All devices keep the same: little bubble in the memory of 1F1B.",
    { schedule: "zb_v", devices: 4, microbatches: 8 }],
  ["Slow links", "Values now take time on their way, and a link carries one at a time. In 1F1B each device waits for its " +
    "neighbour again and again. Take eager_1f1b, then compare them all in the table below.",
    { schedule: "1f1b", devices: 4, microbatches: 8, hop: 0.3, transfer: 0.4 }],
  ["A tight limit", "Each device has room for three activations. The greedy list scheduler keeps within the limit; " +
    "raise it and watch the step get shorter until more memory buys nothing.",
    { schedule: "greedy", devices: 4, microbatches: 12, memory: 3 }],
];
