// Package proxy is the gateway's data path. It classifies a request, asks admission, queues the
// request, passes it to the server that will answer soonest, and settles its cost. gateway/schedule
// decides the order of requests, gateway/balance the servers; the mutex in dispatch.go guards both. The
// rest is net/http and httputil.ReverseProxy. The package knows nothing of files and listeners. Read
// proxy.go next, then exchange.go.
package proxy
