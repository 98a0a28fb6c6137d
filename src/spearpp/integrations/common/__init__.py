"""Code that all integrations share: jobs and reports, the worker and its queue, policies, sampling and names."""
