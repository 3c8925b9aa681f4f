"""x"""
def summarize(r, d=None): return str(r.route)
