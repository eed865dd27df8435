// Package charts tests the container files of SRTM: the Helm chart, rendered by Helm's own engine and
// decoded strictly as Kubernetes' types; the compose file, by compose's loader; the Dockerfile, by
// BuildKit's parser; and the alert rules, by Prometheus' own engine. No container runs.
package charts
