// Package console is the web console: pages for operators under /ui/, of a cluster, which
// the loaddistributor serves, or of one standalone broker, which nsqd serves. All that
// they show comes from the public API, gRPC and a broker's HTTP, so that another console
// could be written.
//
// console.go has what it is made of, guard.go who may see and do what, watch.go what it
// asks of the cluster and keeps, pages.go and its neighbours a function for each page,
// live.go the streams that keep pages up to date. What a topic's stats mean is in
// package why, the last hour in package history. Pages are html/template
// (templates/), scripts and styles are in assets/: nothing is fetched from elsewhere.
package console
