package httpapi

import (
	"fmt"
	"math"
	"net"
	"net/http"

	"github.com/srtm-io/srtm/nsqd/broker"
	"github.com/srtm-io/srtm/pacing/police"
)

// pacingJSON describes a topic's pacing.
type pacingJSON struct {
	Mode         broker.PaceMode `json:"mode"`
	Paced        bool            `json:"paced"`
	Rate         float64         `json:"rate"` // msg/s for each unit of weight
	SumWeights   float64         `json:"sum_weights"`
	LimitedShare float64         `json:"limited_share"` // share of the messages whose publishers want less than they may send
	Refused      uint64          `json:"refused"`       // messages refused by police
	// Publishers with connections, or active in the last seconds. Omitted if clients are not
	// requested.
	Publishers []pacedJSON `json:"publishers,omitempty"`
}

type pacedJSON struct {
	Kind   string  `json:"kind"` // source of the identity: auth, cert, client, addr
	ID     string  `json:"id"`
	Rate   float64 `json:"rate"` // measured, msg/s
	Weight float64 `json:"weight"`
	Told   float64 `json:"told"` // advised rate, msg/s; 0 while no publisher is paced
}

func pacingOf(p broker.Paced) pacingJSON {
	j := pacingJSON{
		Mode: p.Mode, Paced: p.Paced, Rate: p.Rate, SumWeights: p.SumWeights, LimitedShare: p.LimitedShare, Refused: p.Refused,
	}
	for _, publisher := range p.Publishers {
		j.Publishers = append(j.Publishers, pacedJSON{publisher.Identity.Kind, publisher.Identity.ID, publisher.Rate, publisher.Weight, publisher.Advised})
	}
	return j
}

// publisherOf returns the publisher's identity: from the auth servers, else from the certificate,
// else the host.
func publisherOf(r *http.Request) police.Identity {
	if b, ok := r.Body.(*body); ok && b.identity != "" {
		return police.Identity{Kind: "auth", ID: b.identity}
	}
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 && r.TLS.PeerCertificates[0].Subject.CommonName != "" {
		return police.Identity{Kind: "cert", ID: r.TLS.PeerCertificates[0].Subject.CommonName}
	}
	host, _, _ := net.SplitHostPort(r.RemoteAddr) // empty for a Unix socket
	return police.Identity{Kind: "addr", ID: host}
}

// setAdvice sets the rate limit headers for a paced publisher: q messages in w seconds, with r messages
// left (draft-ietf-httpapi-ratelimit-headers).
func setAdvice(h http.Header, advice broker.Advised) {
	if !advice.Paced {
		return
	}
	w := max(1, math.Ceil(float64(advice.Burst)/advice.Rate))
	q := max(float64(advice.Burst), math.Floor(advice.Rate*w))
	h.Set("RateLimit-Policy", fmt.Sprintf(`"pace";q=%.0f;w=%.0f`, q, w))
	h.Set("RateLimit", fmt.Sprintf(`"pace";r=%.0f;t=%.0f`, max(0, q-math.Ceil(advice.Measured*w)), w))
}
