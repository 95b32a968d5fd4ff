"""The vendor's runtime (tensorrt-edgellm) as an engine. Nothing imports it before an engine of this kind is opened.

native      the vendor's module: how it is found, what it can do
fields      the batch-wide fields of one native call, each set explicitly
rules       what a request may ask for here, and which requests may share a call
prompt      token ids as the text that the runtime takes
rows        one row's stream channel: trimming, finish reasons, acceptance; book: all rows, and the step reports
call        one native call for one batch, and what it counted
static      the engine of closed batches (drafting); in_flight: the engine whose rows join at any time
open        from a bundle to an engine
bundle      what was built: layout, limits, audit
builder     the vendor's builder in a child process (builder_child), its cache, its one correction (feedback)
misread     checkpoints that the vendor's resolver would read wrongly; rewrite: the way out
"""
