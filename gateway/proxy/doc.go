// Package proxy is the gateway's data path: it classifies a request, asks admission,
// lets it wait for its turn, passes it to the server that will answer soonest, and
// settles what it took. What goes when is gateway/schedule's, where to gateway/balance's,
// and both are under the one mutex of dispatch.go; the rest is net/http and
// httputil.ReverseProxy. It knows nothing of files and listeners. Read proxy.go next,
// then exchange.go.
package proxy
