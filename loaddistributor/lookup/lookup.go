package lookup

import (
	"cmp"
	"encoding/json"
	"net/http"

	"github.com/srtm-io/srtm/loaddistributor/controller"
)

// Directory is what the answers are made from; *controller.Controller is one.
type Directory interface {
	Nodes() []controller.Node
	TopicNames() []string
	Producers(topic string) (nodes []controller.Node, channels []string, found bool)
}

// producer is a broker as the clients know it.
type producer struct {
	RemoteAddress    string `json:"remote_address"`
	Hostname         string `json:"hostname"`
	BroadcastAddress string `json:"broadcast_address"`
	TCPPort          int    `json:"tcp_port"`
	HTTPPort         int    `json:"http_port"`
	Version          string `json:"version"`
}

// node is a producer in the answer to /nodes. tombstones[i] belongs to
// topics[i]; we have none.
type node struct {
	producer
	Tombstones []bool   `json:"tombstones"`
	Topics     []string `json:"topics"`
}

type message struct {
	Message string `json:"message"`
}

// Mount adds the routes to mux. version is what /info says.
//
//	GET /ping                  OK
//	GET /info                  {"version"}
//	GET /topics                {"topics"}
//	GET /channels?topic=       {"channels"}, empty for an unknown topic
//	GET /lookup?topic=         {"channels", "producers"}, 404 for an unknown topic
//	GET /nodes                 {"producers"} with their topics
//
// Errors are {"message"}: MISSING_ARG_TOPIC, INVALID_ARG_TOPIC (400),
// TOPIC_NOT_FOUND (404). Answers are bare, as of nsqlookupd 1.x, and say so in
// a header, for clients that know the wrapped ones of before.
func Mount(mux *http.ServeMux, dir Directory, version string) {
	mux.HandleFunc("GET /ping", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("OK")) // the client is gone; there is nobody to tell
	})
	mux.HandleFunc("GET /info", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusOK, struct {
			Version string `json:"version"`
		}{version})
	})
	mux.HandleFunc("GET /topics", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusOK, struct {
			Topics []string `json:"topics"`
		}{list(dir.TopicNames())})
	})
	mux.HandleFunc("GET /channels", func(w http.ResponseWriter, r *http.Request) {
		topic, ok := topicOf(w, r)
		if !ok {
			return
		}
		_, channels, _ := dir.Producers(topic)
		reply(w, http.StatusOK, struct {
			Channels []string `json:"channels"`
		}{list(channels)})
	})
	mux.HandleFunc("GET /lookup", func(w http.ResponseWriter, r *http.Request) {
		topic, ok := topicOf(w, r)
		if !ok {
			return
		}
		nodes, channels, found := dir.Producers(topic)
		if !found {
			reply(w, http.StatusNotFound, message{"TOPIC_NOT_FOUND"})
			return
		}
		producers := make([]producer, 0, len(nodes))
		for _, n := range nodes {
			producers = append(producers, producerOf(n))
		}
		reply(w, http.StatusOK, struct {
			Channels  []string   `json:"channels"`
			Producers []producer `json:"producers"`
		}{list(channels), producers})
	})
	mux.HandleFunc("GET /nodes", func(w http.ResponseWriter, _ *http.Request) {
		nodes := []node{}
		for _, n := range dir.Nodes() {
			nodes = append(nodes, node{producerOf(n), make([]bool, len(n.Topics)), list(n.Topics)})
		}
		reply(w, http.StatusOK, struct {
			Producers []node `json:"producers"`
		}{nodes})
	})
}

// topicOf returns the topic asked for, or answers that there is none.
func topicOf(w http.ResponseWriter, r *http.Request) (string, bool) {
	topic := r.URL.Query().Get("topic")
	switch {
	case topic == "":
		reply(w, http.StatusBadRequest, message{"MISSING_ARG_TOPIC"})
		return "", false
	case len(topic) > 64+len("#ephemeral"):
		reply(w, http.StatusBadRequest, message{"INVALID_ARG_TOPIC"})
		return "", false
	}
	return topic, true
}

func producerOf(n controller.Node) producer {
	// The hello was checked: both parse.
	host, tcp, _ := controller.HostPort(n.TCPAddress)
	_, http, _ := controller.HostPort(n.HTTPAddress)
	return producer{
		RemoteAddress: n.Remote, Hostname: cmp.Or(n.Hostname, host), BroadcastAddress: host,
		TCPPort: tcp, HTTPPort: http, Version: n.Version,
	}
}

// list makes JSON say [] and not null.
func list(names []string) []string {
	if names == nil {
		return []string{}
	}
	return names
}

func reply(w http.ResponseWriter, code int, body any) {
	encoded, err := json.Marshal(body)
	if err != nil {
		panic("lookup: an answer that does not encode: " + err.Error())
	}
	w.Header().Set("X-NSQ-Content-Type", "nsq; version=1.0")
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(code)
	_, _ = w.Write(encoded) // the client is gone; there is nobody to tell
}
