"""An OpenAI-compatible HTTP front for a queue (`edgellm-producer gateway`, extra ``gateway``).

It holds no state of its own: a request becomes a job, the job's reply becomes the response. Any number of gateways may
serve one queue. The only thing it adds is that a client that hangs up cancels its job.
"""
