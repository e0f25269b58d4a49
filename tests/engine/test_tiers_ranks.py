import pytest
from turned_engine import Engine, answer
from engine.test_tiers import TEXT, OTHER, cached, engine

def test_exact(tiny_model, tmp_path, engine):
    import time
    t=time.time()
    plain = Engine(tiny_model, enable_prefix_caching=False, tensor_parallel_size=2)
    expected = answer(plain.ask(TEXT))
    print("plain", time.time()-t)
    one = engine(tiny_model, exact=True, tensor_parallel_size=2, disk_cache=tmp_path, host_cache_bytes=8<<20)
    assert answer(one.ask(TEXT)) == expected
    one.core.reset_cache()
    out = one.ask(TEXT)
    print(cached(out), answer(out)==expected, one.core.stats().tiers)
    one.end()
    print("end", time.time()-t)
    two = engine(tiny_model, exact=True, tensor_parallel_size=2, disk_cache=tmp_path)
    out = two.ask(TEXT)
    print(cached(out), answer(out)==expected, two.core.stats().tiers)
    print("end", time.time()-t)
    plain.core.close()
