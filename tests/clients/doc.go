// Package clients drives real client libraries against nsqd: go-nsq, pynsq, nsqjs, nsq-j and tokio-nsq
// speak NSQ's protocol; mosquitto_pub and mosquitto_sub, paho for Go and for Python, and mqtt.js speak
// MQTT 3.1.1 and 5.0. The package contains only tests. Each library has a driver in a folder here, a small
// program in its own language. The driver knows nothing of SRTM, and the tests know about a library
// only what its driver reports.
//
// A driver takes one argument, a JSON object (the type order below), reads lines of JSON from standard
// input and writes events to standard output:
//
//	mode produce  each line is a list of bodies, to be published until it is
//	              acknowledged; then {"event":"published","count":n}
//	mode consume  {"event":"message","body":...,"attempts":n} for each message;
//	              the order's "handle" says how to handle the message
//
// At the end of its input a driver closes its connections, writes {"event":"done"} and exits with 0.
//
// go-nsq and paho for Go run with every `go test`. The others run with SRTM_CLIENTS=1, as in `make test`: the tests
// first install them, at the versions that the lock files here pin, into srtm/clients of the user's cache
// folder (os.UserCacheDir), for all checkouts. The tests skip a language, with the reason, if its runtime
// is missing, or if the library is not installed yet and its package registry cannot be reached. The tests print a summary at the end.
//
// A subscriber of MQTT also writes {"event":"ready","present":...} after its SUBACK.
//
//	SRTM_CLIENTS_MOSQUITTO=path   tests the devices of MQTT against this mosquitto
//	SRTM_CLIENTS_NSQD=path        tests another nsqd, of whatever origin
//	SRTM_CLIENTS_NSQLOOKUPD=path  and for lookups this nsqlookupd
//
// Read clients_test.go next: the scenarios. tests/conformance checks nsqd's own behaviour, byte by
// byte.
package clients
