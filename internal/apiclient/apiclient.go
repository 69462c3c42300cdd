// Package apiclient tunes the configuration of clients of the API server.
package apiclient

import (
	"cmp"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// Tuned returns a copy of cfg without a client-side rate limit: the server's priority and fairness is
// the limit. userAgent is sent unless cfg names one.
func Tuned(cfg *rest.Config, userAgent string) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS, cfg.RateLimiter = -1, nil
	cfg.UserAgent = cmp.Or(cfg.UserAgent, userAgent)
	return cfg
}

// Protobuf returns a copy of cfg for clients of built-in kinds, which protobuf encodes at a fraction
// of JSON's cost. Custom resources need JSON.
func Protobuf(cfg *rest.Config) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.ContentType = runtime.ContentTypeProtobuf
	cfg.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	return cfg
}

// Shared returns a configuration whose clients share one transport, and so one connection to each server.
func Shared(cfg *rest.Config) (*rest.Config, error) {
	server, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, err
	}
	transport, err := rest.TransportFor(cfg)
	if err != nil {
		return nil, err
	}
	return &rest.Config{
		Host: server.String(), Transport: transport, ContentConfig: cfg.ContentConfig, UserAgent: cfg.UserAgent,
		QPS: cfg.QPS, WarningHandler: cfg.WarningHandler, WarningHandlerWithContext: cfg.WarningHandlerWithContext, Timeout: cfg.Timeout,
	}, nil
}
