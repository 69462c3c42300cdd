// Package envoyauth has the messages by which servers of Envoy's protocol envoy.service.auth.v3 are asked about requests, as far as a
// load balancer of Gateways uses them. It knows no connection.
//
// https://www.envoyproxy.io/docs/envoy/latest/api-v3/service/auth/v3/external_auth.proto
package envoyauth
