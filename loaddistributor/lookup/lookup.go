// Package lookup is an nsqlookupd over the controller and package registry. Stock
// consumers and tools query it over HTTP for the producers of a topic (lookup.go). Nodes
// without an agent, such as NSQ's own nsqd, register over TCP (nodes.go). directory.go
// joins the brokers of both sources.
//
// The package has no placement logic. A broker produces a topic if the Cluster has it,
// or if the broker registered the topic.
package lookup

import (
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/srtm-io/srtm/loaddistributor/registry"
	"github.com/srtm-io/srtm/nsq/wire"
)

// fault is a refusal in an answer.
type fault struct {
	status int
	code   string
	detail string // advice to the client; "": none
}

// Paths are the paths that NSQ's clients read.
var Paths = []string{"/lookup", "/topics", "/channels", "/nodes", "/info"}

// Mount adds nsqlookupd's routes to mux. version is the version in /info. If metrics is
// nil, Mount registers no metrics.
//
//	GET  /ping                                OK
//	GET  /info                                {"version"}
//	GET  /topics                              {"topics"}
//	GET  /channels?topic=                     {"channels"}, empty for an unknown topic
//	GET  /lookup?topic=                       {"channels", "producers"}, 404 TOPIC_NOT_FOUND for an unknown topic,
//	                                          503 NOT_READ_YET for an unknown topic while the store cannot be read
//	GET  /nodes                               {"producers"} with their topics and tombstones
//	POST /topic/create?topic=                 adds a topic without a producer
//	POST /topic/delete?topic=                 forgets a topic until a node registers it again
//	POST /topic/tombstone?topic=&node=        hides the producer (host:port of its HTTP) for a time
//	POST /channel/create?topic=&channel=
//	POST /channel/delete?topic=&channel=      404 CHANNEL_NOT_FOUND for an unknown channel
//
// Create and delete affect only registrations of nodes. Placed topics and brokers with an
// agent belong to the controller and stay. Answers to POST are empty, without a body.
// Errors are {"message"}: MISSING_ARG_*, INVALID_ARG_* (400), METHOD_NOT_ALLOWED (405),
// and NOT_FOUND (404) for any path without another route in mux. Answers are unwrapped,
// as in nsqlookupd 1.x. A header says so, for clients that also know the older wrapped
// answers.
func Mount(mux *http.ServeMux, dir *Directory, version string, metrics prometheus.Registerer) {
	answers := newAnswers(metrics)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, fault{http.StatusNotFound, "NOT_FOUND", ""})
	})
	route(mux, http.MethodGet, "/ping", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("OK")) // an error means that the client has left
	})
	route(mux, http.MethodGet, "/info", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, map[string]any{"version": version})
	})
	route(mux, http.MethodGet, "/topics", func(w http.ResponseWriter, r *http.Request) {
		answers.listing(w, r, func() any { return map[string]any{"topics": orEmpty(dir.topics())} })
	})
	route(mux, http.MethodGet, "/nodes", func(w http.ResponseWriter, r *http.Request) {
		answers.listing(w, r, func() any { return map[string]any{"producers": dir.nodes()} })
	})
	routeTopic(mux, "/channels", func(w http.ResponseWriter, topic string) {
		_, channels, _ := dir.lookup(topic)
		answers.reply(w, map[string]any{"channels": orEmpty(channels)})
	})
	routeTopic(mux, "/lookup", func(w http.ResponseWriter, topic string) {
		producers, channels, found := dir.lookup(topic)
		if informed, _ := dir.cluster.Informed(); !found && !informed {
			refuse(w, fault{http.StatusServiceUnavailable, "NOT_READ_YET", "the store cannot be read, and the topic may be there: ask again soon"})
			return
		}
		if !found {
			refuse(w, fault{http.StatusNotFound, "TOPIC_NOT_FOUND", "GET /topics lists the topics; srtm topic create NAME creates one"})
			return
		}
		answers.reply(w, map[string]any{"channels": orEmpty(channels), "producers": producers})
	})
	routeChange(mux, "/topic/create", []string{"topic"}, true, func(args []string) error {
		return dir.change(func(r *registry.Registry) error { return r.CreateTopic(args[0]) })
	})
	routeChange(mux, "/topic/delete", []string{"topic"}, false, func(args []string) error {
		return dir.change(func(r *registry.Registry) error { r.DeleteTopic(args[0]); return nil })
	})
	routeChange(mux, "/topic/tombstone", []string{"topic", "node"}, false, func(args []string) error {
		dir.tombstone(args[0], args[1])
		return nil
	})
	routeChange(mux, "/channel/create", []string{"topic", "channel"}, true, func(args []string) error {
		return dir.change(func(r *registry.Registry) error { return r.CreateChannel(args[0], args[1]) })
	})
	routeChange(mux, "/channel/delete", []string{"topic", "channel"}, true, func(args []string) error {
		return dir.change(func(r *registry.Registry) error { return r.DeleteChannel(args[0], args[1]) })
	})
}

// route answers one method of a path.
func route(mux *http.ServeMux, method, path string, handle http.HandlerFunc) {
	mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == method {
			handle(w, r)
			return
		}
		allowed := []string{method, http.MethodOptions}
		slices.Sort(allowed)
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		if r.Method != http.MethodOptions {
			refuse(w, fault{http.StatusMethodNotAllowed, "METHOD_NOT_ALLOWED", ""})
		}
	})
}

// routeTopic answers a query about a topic of any name.
func routeTopic(mux *http.ServeMux, path string, handle func(w http.ResponseWriter, topic string)) {
	route(mux, http.MethodGet, path, func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		if !query.Has("topic") {
			refuse(w, fault{http.StatusBadRequest, "MISSING_ARG_TOPIC", ""})
			return
		}
		handle(w, query.Get("topic"))
	})
}

// routeChange handles a request with the named arguments. If check is set, the arguments
// must be valid topic or channel names.
func routeChange(mux *http.ServeMux, path string, names []string, check bool, handle func(args []string) error) {
	route(mux, http.MethodPost, path, func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		var args []string
		for _, name := range names {
			if !query.Has(name) {
				refuse(w, fault{http.StatusBadRequest, "MISSING_ARG_" + strings.ToUpper(name), ""})
				return
			}
			arg := query.Get(name)
			if check && !wire.ValidTopicName(arg) {
				refuse(w, fault{http.StatusBadRequest, "INVALID_ARG_" + strings.ToUpper(name), ""})
				return
			}
			args = append(args, arg)
		}
		switch err := handle(args); {
		case errors.Is(err, registry.ErrChannelUnknown):
			refuse(w, fault{http.StatusNotFound, "CHANNEL_NOT_FOUND", ""})
		case err != nil:
			refuse(w, fault{http.StatusInsufficientStorage, "TOO_MANY_NAMES", ""})
		default:
			w.Header().Set(contentType, bare)
		}
	})
}

// contentType is the header with the form of an answer.
const (
	contentType = "X-NSQ-Content-Type"
	bare        = "nsq; version=1.0"
)

func refuse(w http.ResponseWriter, f fault) {
	answer := map[string]any{"message": f.code}
	if f.detail != "" {
		answer["detail"] = f.detail
	}
	write(w, f.status, encode(answer))
}

func reply(w http.ResponseWriter, body any) { write(w, http.StatusOK, encode(body)) }

func write(w http.ResponseWriter, status int, encoded []byte) {
	w.Header().Set(contentType, bare)
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(encoded) // an error means that the client has left
}
