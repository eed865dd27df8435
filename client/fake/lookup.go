package fake

import (
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
)

// Lookup answers GET /lookup?topic= like nsqlookupd.
type Lookup struct {
	srv *httptest.Server // set once

	mu struct {
		sync.Mutex
		brokers map[string][]string // by topic
	}
}

// NewLookup starts a server on a free port of 127.0.0.1.
func NewLookup() *Lookup {
	l := &Lookup{}
	l.mu.brokers = map[string][]string{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /lookup", l.lookup)
	l.srv = httptest.NewServer(mux)
	return l
}

// Address returns host:port.
func (l *Lookup) Address() string { return l.srv.Listener.Addr().String() }

// Close closes all connections and waits.
func (l *Lookup) Close() {
	l.srv.CloseClientConnections()
	l.srv.Close()
}

// Set sets the brokers of a topic.
func (l *Lookup) Set(topic string, brokers ...*Broker) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.brokers[topic] = nil
	for _, b := range brokers {
		l.mu.brokers[topic] = append(l.mu.brokers[topic], b.Address())
	}
}

func (l *Lookup) lookup(w http.ResponseWriter, req *http.Request) {
	type producer struct {
		BroadcastAddress string `json:"broadcast_address"`
		TCPPort          int    `json:"tcp_port"`
	}
	var producers []producer
	l.mu.Lock()
	for _, address := range l.mu.brokers[req.URL.Query().Get("topic")] {
		host, port, err := net.SplitHostPort(address)
		n, bad := strconv.Atoi(port)
		if err := errors.Join(err, bad); err != nil {
			panic(err) // addresses come from this package
		}
		producers = append(producers, producer{host, n})
	}
	l.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-NSQ-Content-Type", "nsq; version=1.0")
	// An error means that the client is gone.
	_ = json.NewEncoder(w).Encode(map[string]any{"channels": []string{}, "producers": producers})
}
