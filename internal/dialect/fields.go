package dialect

import "slices"

// Field names a part of a Spec, as people read it.
type Field string

// The fields.
const (
	FieldAddresses       Field = "addresses"
	FieldPool            Field = "pool"
	FieldSharingKey      Field = "sharing key"
	FieldInternal        Field = "internal"
	FieldProtocol        Field = "protocol"
	FieldBackend         Field = "backend protocol"
	FieldCertificates    Field = "certificates"
	FieldBackendCA       Field = "backend CA"
	FieldBackendName     Field = "backend server name"
	FieldBackendCert     Field = "backend client certificate"
	FieldACMEHosts       Field = "ACME hosts"
	FieldACMEChallenge   Field = "ACME challenge"
	FieldTLSPorts        Field = "TLS ports"
	FieldTLSPolicy       Field = "TLS policy"
	FieldALPN            Field = "ALPN"
	FieldProxyProtocol   Field = "PROXY protocol"
	FieldTrustedFronts   Field = "trusted fronts"
	FieldSourceRanges    Field = "source ranges"
	FieldIdleTimeout     Field = "idle timeout"
	FieldRequestTimeout  Field = "request timeout"
	FieldDraining        Field = "draining"
	FieldDrainTimeout    Field = "draining timeout"
	FieldBalance         Field = "balance"
	FieldCrossZone       Field = "cross zone"
	FieldHealthEnabled   Field = "health check"
	FieldHealthProtocol  Field = "health check protocol"
	FieldHealthPort      Field = "health check port"
	FieldHealthPath      Field = "health check path"
	FieldHealthHealthy   Field = "healthy threshold"
	FieldHealthUnhealthy Field = "unhealthy threshold"
	FieldHealthInterval  Field = "health check interval"
	FieldHealthTimeout   Field = "health check timeout"
	FieldHealthCodes     Field = "health check codes"
	FieldBandwidth       Field = "bandwidth"
	FieldConnections     Field = "connection limit"
	FieldTags            Field = "tags"
	FieldBackendNodes    Field = "backend nodes"
	FieldBackends        Field = "backends"
	FieldOnlyWithPod     Field = "only nodes with a Pod"
	FieldSkipCordoned    Field = "without cordoned nodes"
	FieldLogEnabled      Field = "access log"
	FieldLogEvery        Field = "access log interval"
	FieldLogBucket       Field = "access log bucket"
	FieldLogPrefix       Field = "access log prefix"
	FieldLogFormat       Field = "access log format"
	FieldLogCredentials  Field = "access log credentials"
	FieldHeaders         Field = "forwarded headers"
	FieldStickyCookie    Field = "sticky cookie"
	FieldStickyApp       Field = "application's cookie"
	FieldStickyLifetime  Field = "sticky cookie lifetime"
	FieldSlowStart       Field = "slow start"
	FieldWeightLabel     Field = "weight label"
	FieldAllUnhealthy    Field = "when all are unhealthy"
	FieldClientPort      Field = "client port header"
	FieldEject           Field = "ejection"
	FieldRedirects       Field = "redirects to https"
	FieldHealthHost      Field = "health check host"
	FieldHealthMethod    Field = "health check method"
	FieldClientCA        Field = "client CA"
	FieldClientAuth      Field = "client certificate"
	FieldClientField     Field = "client subject header"
	FieldClientRequests  Field = "requests of a client"
	FieldClientConns     Field = "connections of a client"
	FieldRequestBody     Field = "request body"
	FieldUnderscores     Field = "header names with _"
	FieldRequestID       Field = "request identifier"
	FieldCompress        Field = "compression of answers"
)

// notYet has the fields that this version reads and does not act on, and what happens
// instead. What is implemented leaves it.
var notYet = map[Field]string{
	FieldClientPort: "the client's port is not sent; X-Forwarded-For has its address",
}

// always are the fields that have their effect in either way; the others are of the
// proxied way.
var always = []Field{FieldAddresses, FieldPool, FieldSharingKey, FieldInternal, FieldTags}

// IsBuilt reports whether this version acts on a field.
func (f Field) IsBuilt() bool {
	_, missing := notYet[f]
	return !missing
}

// Instead returns what happens in place of what a field asks for, empty if this version acts on it.
func (f Field) Instead() string { return notYet[f] }

// IsOfBothWays reports whether a field has its effect in the direct way, too.
func (f Field) IsOfBothWays() bool { return slices.Contains(always, f) }
