"""An engine without a model: what it is asked to generate, a model server elsewhere generates.

node --token-level protocol--> server.py --messages--> remote.py --HTTP, SSE--> vLLM, SGLang, llama.cpp, a hosted API
     <--------- tokens -------- answer.py <--- chunks ---
"""
