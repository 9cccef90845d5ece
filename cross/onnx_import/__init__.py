"""From an ONNX file to a `cross.graph.Model`, one concern a file, in the order of the work:

read        file -> ModelProto; broken files and files outside the model's folder are refused
source      ModelProto -> one plain graph: functions inlined, constants gathered, input and output chosen
propagate   constants folded; shapes at two batch sizes, so that the batch is symbolic whatever the file fixed
preflight   every operator that cannot be trained, in one message
operators   the table ONNX operator -> conversion, and draft, the graph that conversions write to
layout      channels-last graphs (Keras) turned to NCHW
simplify    padding into convolutions, SiLU, what is left over
head        softmax removed, class count replaced
inits       how each tensor is initialised from a seed
blocks      named blocks and cut points
unfold      batch norms put back after convolutions that had theirs folded
"""
