package lookup_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/lookup"
)

// resolver answers by the publisher's id.
type resolver map[string]error

func (r resolver) Resolve(topic, publisher string) (catalog.Assignment, error) {
	if err := r[publisher]; err != nil {
		return catalog.Assignment{}, fmt.Errorf("topic %s: %w", topic, err)
	}
	a := catalog.Assignment{Publisher: publisher, Epoch: 7}
	a.Broker, a.TCPAddress, a.HTTPAddress = "b1", "b1.example:4150", "b1.example:4151"
	if publisher == "device" {
		a.MQTTAddress, a.MQTTSAddress = "b1.example:1883", "b1.example:8883"
	}
	return a, nil
}

func TestWhereAPublisherBelongs(t *testing.T) {
	mux := http.NewServeMux()
	lookup.MountPublisher(mux, resolver{
		"none": catalog.ErrPublisherUnknown, "early": catalog.ErrNotActive, "out": catalog.ErrUnplaced, "gone": catalog.ErrTopicUnknown, "odd": errors.New("of no known kind"),
	})
	for _, c := range []struct {
		method, query string
		status        int
		want, retry   string
	}{
		{"GET", "?topic=t&id=loop%2F7", 200, `{"topic":"t","publisher_id":"loop/7","broker_id":"b1","tcp_address":"b1.example:4150","http_address":"b1.example:4151","epoch":7}`, ""},
		{"GET", "?topic=t&id=device", 200, `"http_address":"b1.example:4151","mqtt_address":"b1.example:1883","mqtts_address":"b1.example:8883","epoch":7}`, ""},
		{"GET", "?id=p", 400, `"message":"MISSING_ARG_TOPIC"`, ""},
		{"GET", "?topic=t", 400, `"message":"MISSING_ARG_ID"`, ""},
		{"GET", "?topic=t&id=", 400, `"message":"MISSING_ARG_ID"`, ""},
		{"GET", "?topic=t&id=gone", 404, `"message":"TOPIC_NOT_FOUND"`, ""},
		{"GET", "?topic=t&id=none", 404, `"message":"PUBLISHER_NOT_FOUND"`, ""},
		{"GET", "?topic=t&id=early", 503, `"message":"TOPIC_NOT_ACTIVE"`, "1"},
		{"GET", "?topic=t&id=out", 503, `"message":"PUBLISHER_NOT_PLACED"`, "1"},
		{"GET", "?topic=t&id=odd", 500, `"message":"INTERNAL_ERROR"`, ""},
		{"POST", "?topic=t&id=p", 405, `"message":"METHOD_NOT_ALLOWED"`, ""},
	} {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(c.method, "/publisher"+c.query, nil))
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.want) || w.Header().Get("Retry-After") != c.retry {
			t.Errorf("%s %s: %d %s, retry after %q; want %d %s", c.method, c.query, w.Code, w.Body, w.Header().Get("Retry-After"), c.status, c.want)
		}
		if hint := strings.Contains(w.Body.String(), `"detail":"`); hint != (c.status == 400 || c.status == 404 || c.status == 503) {
			t.Errorf("%s %s: %s: a refusal says what to do", c.method, c.query, w.Body)
		}
	}
}
