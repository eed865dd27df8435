package controller

import (
	"context"
	"errors"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/loaddistributor/reconcile"
	"github.com/srtm-io/srtm/loaddistributor/tuner"
)

// span begins a span, whose end says what has come of it.
func (o *owners) span(ctx context.Context, name string, of ...attribute.KeyValue) (_ context.Context, end func(error)) {
	ctx, span := o.tracer.Start(ctx, name, trace.WithAttributes(of...))
	return ctx, func(err error) {
		if err != nil && !errors.Is(err, reconcile.ErrSettled) {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

// what names the span of an operation, which is below that of the request if one asked.
func (op operation) what() string {
	switch {
	case op.creation != nil:
		return "create topic"
	case op.decide != nil:
		return "move publishers"
	case op.target.Gone:
		return "delete topic"
	case op.target.Retire != "":
		return "retire broker"
	}
	return "reconcile topic"
}

// attributes are those of the span.
func (op operation) attributes() []attribute.KeyValue {
	of := []attribute.KeyValue{attribute.String(obs.KeyTopic, op.name)}
	switch {
	case op.creation != nil:
	case op.decide != nil:
		of = append(of, attribute.String(obs.KeyReason, strings.TrimPrefix(op.cause.reason.String(), "MOVE_REASON_")), attribute.String("why", op.cause.why))
	case op.target.Retire != "":
		of = append(of, attribute.String(obs.KeyBroker, op.target.Retire))
	}
	return of
}

// traceFit makes a span of a fit that has just ended, with an event for each placement that
// it tried and still remembers.
func (t *tuning) traceFit(e tuner.Ended, trials []tuner.Trial, now time.Time) {
	_, span := t.tracer.Start(context.Background(), "fit topic", trace.WithTimestamp(now.Add(-e.Took)),
		trace.WithAttributes(attribute.String(obs.KeyTopic, e.Topic), attribute.String("outcome", e.How)))
	for _, trial := range trials {
		span.AddEvent("trial", trace.WithTimestamp(trial.Began), trace.WithAttributes(attribute.Int("brokers", len(trial.Quotas)), attribute.String("verdict", trial.Verdict)))
	}
	span.End(trace.WithTimestamp(now))
}
