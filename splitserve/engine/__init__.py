"""The engine: plan a step, run it, apply its result. One engine serves every role.

request     what is known of one request            torch-free
step        what a step computes, self-contained     torch-free
scheduler   decides (pure, time as an argument)      torch-free
batch       a step as tensors
constraint  which tokens grammars leave to choose from
sampler     chooses tokens
runner      a step on the model of one rank
transfers   the engine's end of handoffs
loop        rank 0: messages in, steps, tokens out
rank        the process
"""
