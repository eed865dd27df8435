// Package clients drives real client libraries of NSQ against nsqd: go-nsq,
// pynsq, nsqjs, nsq-j and tokio-nsq. It is all tests. Each library has a driver
// in a folder here, a small program in its own language, and knows nothing of
// SRTM; the tests know nothing of the libraries but what a driver says.
//
// A driver takes one argument, a JSON object (the type order below), reads
// lines of JSON from standard input and writes events to standard output:
//
//	mode produce  each line is a list of bodies, to be published until it is
//	              acknowledged; then {"event":"published","count":n}
//	mode consume  {"event":"message","body":...,"attempts":n} for each message;
//	              what becomes of it is the order's "handle"
//
// At the end of its input it closes its connections, says {"event":"done"} and
// exits with 0.
//
// go-nsq runs with every `go test`. The others run with SRTM_CLIENTS=1, as in
// `make test`: they are installed first, at the versions that the lock files
// here pin, into build/clients. A language is skipped, with that reason, when its
// runtime is not there, or when it is not installed yet and its package registry
// cannot be reached. A summary is printed at the end.
//
//	SRTM_CLIENTS_NSQD=path        tests another nsqd, of whatever origin
//	SRTM_CLIENTS_NSQLOOKUPD=path  and for lookups this nsqlookupd
//
// Read clients_test.go next: the scenarios. nsqd's own behaviour, byte by byte,
// is tests/conformance.
package clients
