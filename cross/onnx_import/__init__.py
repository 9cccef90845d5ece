"""From an ONNX file to a `cross.graph.Model`, one concern a file, in the order of the work.

- read: file -> ModelProto; broken files and files outside the model's folder are refused
- source: ModelProto -> one plain graph: functions inlined, constants gathered, input and output chosen
- propagate: constants folded; shapes at two batch sizes, so that the batch is symbolic whatever the file fixed
- heads: transposes of attention heads that were spelled through a merged batch
- operators: the table ONNX operator -> conversion (layer_, elementwise_ and shape_operators), and the preflight, which
  names every operator that cannot be trained in one message; operator is one node being converted, draft the graph
  that conversions write to, infer the shapes of what they write
- layout: channels-last graphs (Keras) turned to channels-first
- simplify: padding into convolutions, SiLU; patterns: GELU and layer norm from their small steps
- head: softmax removed, class count replaced
- inits: how each tensor is initialised from a seed; calibrate: its scale where there is no batch norm
- blocks: named blocks and cut points
- unfold: batch norms put back after convolutions that had theirs folded, on one pass of evaluate
"""
