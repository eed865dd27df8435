package mqtt

import "github.com/prometheus/client_golang/prometheus"

// metrics are the metrics of a Server.
type metrics struct {
	refusedOnce prometheus.Counter // publishes with QoS 0
	tooLarge    prometheus.Counter // messages
	ignored     *prometheus.CounterVec
	refused     *prometheus.CounterVec
	takeovers   prometheus.Counter
	redirects   prometheus.Counter
	lostWills   prometheus.Counter
}

// register creates the metrics and adds them to the registry.
func (m *metrics) register(registry prometheus.Registerer, of *sessions) {
	m.refusedOnce = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_refused_qos0_total", Help: "Publishes with QoS 0 that the broker refused. The client gets no answer.",
	})
	m.tooLarge = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_too_large_total", Help: "Messages that were not sent because they exceed the client's maximum packet size.",
	})
	m.ignored = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_ignored_total", Help: "Publishes of MQTT clients of which nsqd ignored a part: the wish to retain the message, or properties that are too large.",
	}, []string{"part"})
	m.refused = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_refused_total", Help: "Sessions, subscriptions and wills of MQTT clients that the broker refused.",
	}, []string{"part"})
	m.takeovers = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_takeovers_total", Help: "Connections that ended because another connection has the same client id.",
	})
	m.redirects = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_redirects_total", Help: "MQTT clients that the broker sent to the broker of their publisher.",
	})
	m.lostWills = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "srtm_nsqd_mqtt_lost_wills_total", Help: "Wills of MQTT clients that the broker could not publish.",
	})
	registry.MustRegister(m.refusedOnce, m.tooLarge, m.ignored, m.refused, m.takeovers, m.redirects, m.lostWills,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_nsqd_mqtt_sessions", Help: "Sessions of MQTT clients that the broker keeps."}, func() float64 {
			of.mu.Lock()
			defer of.mu.Unlock()
			return float64(of.mu.kept)
		}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "srtm_nsqd_mqtt_will_bytes", Help: "Memory of the wills of MQTT clients."}, func() float64 {
			return float64(of.wills.Load())
		}))
}
