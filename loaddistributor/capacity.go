package main

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/shortage"
	"github.com/srtm-io/srtm/loaddistributor/webhook"
)

// checkWebhook makes o.hook.
func (o *options) checkWebhook() error {
	if o.webhook == "" {
		for flag, value := range map[string]string{"tls-ca": o.webhookSecurity.CAFile, "token-file": o.webhookSecurity.TokenFile} {
			if value != "" {
				return fmt.Errorf("--%s%s needs --capacity-webhook", webhookPrefix, flag)
			}
		}
		return nil
	}
	target, err := webhook.Check(o.webhook, o.webhookSecurity.CAFile != "")
	if err != nil {
		return fmt.Errorf("--capacity-webhook: %w", err)
	}
	carrier, err := transport(webhookPrefix, o.webhookSecurity)
	if err != nil {
		return err
	}
	o.hook = &webhook.Config{URL: target, Transport: carrier}
	return nil
}

// lacking is the document for --capacity-webhook. The document names no topic and no tenant.
func lacking(n shortage.Need, now time.Time) []byte {
	document, err := json.Marshal(struct {
		Needed    int       `json:"brokers_needed"`
		Present   int       `json:"brokers"`
		Capacity  int64     `json:"capacity_messages_per_second"`
		Allocated int64     `json:"allocated_messages_per_second"`
		Refused   int       `json:"topics_refused"`
		Rate      int64     `json:"refused_messages_per_second"`
		Unfitted  int       `json:"topics_missing_slo_on_all_brokers"`
		Reason    string    `json:"reason"`
		At        time.Time `json:"at"`
	}{n.Brokers, n.Present, n.Capacity, n.Allocated, n.Refused, n.RefusedRate, n.Unfitted, n.Reason(), now.UTC()})
	if err != nil {
		panic(err) // numbers and a text
	}
	return document
}
