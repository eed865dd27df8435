// Package console is the web console: pages for operators under /ui/. The loaddistributor
// serves the pages of a cluster, and nsqd the pages of a standalone broker. All data
// comes from the public API, gRPC and a broker's HTTP, so anyone could write another
// console.
//
// console.go has the Console and its configuration. guard.go checks who may see and do
// what. watch.go polls the cluster and keeps the results. overview.go, topic.go and their neighbours
// have a function for each page. live.go streams updates to pages. Package why interprets
// a topic's stats, and package history keeps the last hour. Pages are html/template
// (templates/). Scripts and styles are in assets/; pages load nothing from other hosts.
package console
