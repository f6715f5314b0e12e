"""The operator's fault drill: what a store does on this machine when its drives hang, err, crawl, lie or are full."""
