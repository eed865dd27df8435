package lookup

import (
	"errors"
	"net/http"
	"strings"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Resolver returns the assignment of a publisher. *controller.View implements it.
type Resolver interface {
	Resolve(topic, publisher string) (catalog.Assignment, error)
}

// assignment is the answer to /publisher. A larger epoch is newer.
type assignment struct {
	Topic        string `json:"topic"`
	PublisherID  string `json:"publisher_id"`
	BrokerID     string `json:"broker_id"`
	TCPAddress   string `json:"tcp_address"`
	HTTPAddress  string `json:"http_address"`
	MQTTAddress  string `json:"mqtt_address,omitempty"`  // empty: the broker has no MQTT
	MQTTSAddress string `json:"mqtts_address,omitempty"` // MQTT with TLS
	Epoch        uint64 `json:"epoch"`
}

// MountPublisher adds the route where publishers without our library query their broker.
// Such a publisher should query again from time to time, and when its broker closes the
// connection.
//
//	GET /publisher?topic=&id=   {"topic", "publisher_id", "broker_id", "tcp_address", "http_address", "epoch"}
//
// The answer also has "mqtt_address" and "mqtts_address", if the broker listens for MQTT without or with TLS.
//
// Errors, besides Mount's:
//
//   - 404 TOPIC_NOT_FOUND and PUBLISHER_NOT_FOUND.
//   - 503 TOPIC_NOT_ACTIVE with Retry-After, while the topic is being created or deleted.
//   - 503 PUBLISHER_NOT_PLACED with Retry-After, while a fit leaves the publisher
//     unplaced.
//   - 503 NOT_READ_YET with Retry-After, from a loaddistributor that has just started.
func MountPublisher(mux *http.ServeMux, resolver Resolver) {
	route(mux, http.MethodGet, "/publisher", func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		for _, arg := range []string{"topic", "id"} {
			if query.Get(arg) == "" {
				refuse(w, fault{http.StatusBadRequest, "MISSING_ARG_" + strings.ToUpper(arg), "the query needs topic and id: id is the publisher's, as in srtm topic describe, or for an open topic any name"})
				return
			}
		}
		topic, id := query.Get("topic"), query.Get("id")
		a, err := resolver.Resolve(topic, id)
		if err == nil {
			reply(w, assignment{topic, a.Publisher, a.Broker, a.TCPAddress, a.HTTPAddress, a.MQTTAddress, a.MQTTSAddress, a.Epoch})
			return
		}
		f := fault{status: http.StatusInternalServerError, code: "INTERNAL_ERROR"}
		for _, refusal := range refusals {
			if errors.Is(err, refusal.cause) {
				f = refusal.fault
			}
		}
		if f.status == http.StatusServiceUnavailable {
			w.Header().Set("Retry-After", "1")
		}
		refuse(w, f)
	})
}

// refusals maps errors of Resolve to answers.
var refusals = []struct {
	cause error
	fault
}{
	{catalog.ErrTopicUnknown, fault{http.StatusNotFound, "TOPIC_NOT_FOUND", "create it with srtm topic create; srtm topic list shows what there is"}},
	{catalog.ErrPublisherUnknown, fault{http.StatusNotFound, "PUBLISHER_NOT_FOUND", "the topic was created with other publishers: srtm topic describe shows them"}},
	{catalog.ErrNotActive, fault{http.StatusServiceUnavailable, "TOPIC_NOT_ACTIVE", "it is being created or deleted; ask again"}},
	{catalog.ErrUnplaced, fault{http.StatusServiceUnavailable, "PUBLISHER_NOT_PLACED", "the topic is being fitted; ask again"}},
	{catalog.ErrUnread, fault{http.StatusServiceUnavailable, "NOT_READ_YET", "this loaddistributor has just started; ask again"}},
}
