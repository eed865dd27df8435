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

// changeTraced is change in a span, below that of the request if it was one that asked.
func (o *owners) changeTraced(own *owner, op operation) error {
	name := "reconcile topic"
	of := []attribute.KeyValue{attribute.String(obs.KeyTopic, op.name)}
	switch {
	case op.creation != nil:
		name = "create topic"
	case op.decide != nil:
		name = "move publishers"
		of = append(of, attribute.String(obs.KeyReason, strings.TrimPrefix(op.cause.reason.String(), "MOVE_REASON_")), attribute.String("why", op.cause.why))
	case op.target.Gone:
		name = "delete topic"
	case op.target.Retire != "":
		name = "retire broker"
		of = append(of, attribute.String(obs.KeyBroker, op.target.Retire))
	}
	var end func(error)
	op.ctx, end = o.span(op.ctx, name, of...)
	err := o.change(own, op)
	end(err)
	return err
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
