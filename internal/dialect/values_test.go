package dialect

import (
	"reflect"
	"strings"
	"testing"
)

// What means health, and which protocols are offered, is checked when it is read (behaviours 131 to 134).
// What asks for forwarded fields makes a listener of HTTP, or has them anyway.
func TestForwardedFields(t *testing.T) {
	const openstack, alibaba = "loadbalancer.openstack.org/x-forwarded-for", "service.beta.kubernetes.io/alibaba-cloud-loadbalancer-"
	for _, c := range []struct {
		key, value string
		way        Way
		state      State
	}{
		{openstack, "true", Proxied, Applied}, {openstack, "false", Direct, Applied}, {openstack, "x", Direct, Invalid},
		{alibaba + "xforwardedfor-proto", "on", Direct, Applied}, {alibaba + "xforwardedfor-proto", "off", Direct, Meaningless},
		{alibaba + "xforwardedfor-clientsrcport", "on", Direct, NotYet},
	} {
		r := Read(Service{Annotations: map[string]string{c.key: c.value}, Ports: []Port{{Number: 80}}})
		if r.Way != c.way || r.Findings[0].State != c.state || (r.Spec.Listeners[0].Protocol == HTTP) != (c.way == Proxied) {
			t.Errorf("%s %s: %s, %+v, %+v", c.key, c.value, r.Way, r.Findings, r.Spec.Listeners)
		}
	}
}

func TestHealthValues(t *testing.T) {
	for v, want := range map[string][]CodeRange{
		"": {{200, 399}}, "200": {{200, 200}}, "200-299, 401": {{200, 299}, {401, 401}}, "http_2xx,http_5xx": {{200, 299}, {500, 599}},
	} {
		if got, err := ParseCodes(v); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %v, %v", v, got, err)
		}
	}
	for _, v := range []string{"99", "600", "300-200", "http_6xx", "http_xxx", "2xx", "200-", "-", ",", "+200", "200;300", "http_2xxx"} {
		if got, err := ParseCodes(v); err == nil {
			t.Errorf("%q: %v", v, got)
		}
	}
	const own = "fairlead.dev/lb-"
	r := Read(Service{Annotations: map[string]string{
		own + "health-protocol": "grpc", own + "health-path": "no-slash", own + "health-codes": "2xx", own + "alpn-policy": "HTTP3",
	}})
	wrong := map[string]bool{}
	for _, f := range r.Findings {
		wrong[strings.TrimPrefix(f.Annotation, own)] = f.State == Invalid
	}
	if !reflect.DeepEqual(wrong, map[string]bool{"health-protocol": false, "health-path": true, "health-codes": true, "alpn-policy": true}) {
		t.Errorf("%v", wrong)
	}
	if r := Read(Service{Annotations: map[string]string{awsPrefix + "alpn-policy": "HTTP2Preferred"}}); r.Spec.ALPN[0] != "h2" {
		t.Errorf("%v", r.Spec.ALPN)
	}
}
