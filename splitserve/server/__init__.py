"""OpenAI and SGLang HTTP in front of one engine. Torch-free: the engine is another process.

fields, body    what a request body may say; bytes to typed values
params, rooms   typed values to a Job: what the engine is asked, checked against the model's limits
sequential      a router that calls prefill before decode
job, choice     one request while it runs; the text side of one answer
openai, sglang  the two shapes of an answer
engine_link     messages to and from rank 0;  ranks: its processes
app, operator   routes;  openapi: their description;  metrics;  main: the process
"""
