package endpoint

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func check(t *testing.T, what string, errs field.ErrorList, want string) {
	t.Helper()
	switch {
	case want == "" && len(errs) > 0:
		t.Errorf("%s: %v, want it valid", what, errs)
	case want != "" && (len(errs) != 1 || !strings.Contains(errs[0].Error(), want)):
		t.Errorf("%s:\n got  %v\n want %s", what, errs, want)
	}
}

// special are the addresses that may not be an endpoint (behaviour 24).
var special = map[string]string{
	"127.0.0.1": "may not be in the loopback range (127.0.0.0/8, ::1/128)", "::1": "loopback range",
	"169.254.169.254": "may not be in the link-local range (169.254.0.0/16, fe80::/10)", "fe80::1": "link-local range",
	"febf::1":   "link-local range",
	"224.0.0.5": "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)", "ff02::1": "link-local multicast range",
	"0.0.0.0": "may not be unspecified (0.0.0.0)", "::": "may not be unspecified (::)",
}

func endpoints(f func(*corev1.Endpoints)) *corev1.Endpoints {
	e := &corev1.Endpoints{
		ObjectMeta: metav1.ObjectMeta{Name: "my-service", Namespace: "default"},
		Subsets: []corev1.EndpointSubset{{
			Addresses: []corev1.EndpointAddress{{IP: "192.0.2.42"}}, Ports: []corev1.EndpointPort{{Port: 9376}},
		}},
	}
	f(e)
	setEndpointsDefaults(e)
	return e
}

func TestEndpoints(t *testing.T) {
	sub := func(e *corev1.Endpoints) *corev1.EndpointSubset { return &e.Subsets[0] }
	for _, c := range []struct {
		what string
		f    func(*corev1.Endpoints)
		want string
	}{
		{"the example (behaviour 22)", func(*corev1.Endpoints) {}, ""},
		{"a subdomain (behaviour 20)", func(e *corev1.Endpoints) { e.Name = "a.b" }, ""},
		{"name", func(e *corev1.Endpoints) { e.Name = "A" }, `metadata.name: Invalid value: "A"`},
		{"empty subset", func(e *corev1.Endpoints) { sub(e).Addresses = nil },
			"subsets[0]: Required value: must specify `addresses` or `notReadyAddresses`"},
		{"not an address", func(e *corev1.Endpoints) { sub(e).Addresses[0].IP = "web" }, ""},
		{"port 0", func(e *corev1.Endpoints) { sub(e).Ports[0].Port = 0 },
			"subsets[0].ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive"},
		{"two ports without name", func(e *corev1.Endpoints) {
			sub(e).Ports = append(sub(e).Ports, corev1.EndpointPort{Name: "b", Port: 1})
		}, "subsets[0].ports[0].name: Required value"},
		{"protocol", func(e *corev1.Endpoints) { sub(e).Ports[0].Protocol = "ICMP" },
			`subsets[0].ports[0].protocol: Unsupported value: "ICMP": supported values: "SCTP", "TCP", "UDP"`},
		{"node", func(e *corev1.Endpoints) { sub(e).Addresses[0].NodeName = new("a_b") },
			`subsets[0].addresses[0].nodeName: Invalid value: "a_b"`},
		{"hostname", func(e *corev1.Endpoints) { sub(e).Addresses[0].Hostname = "a.b" },
			`subsets[0].addresses[0].hostname: Invalid value: "a.b"`},
	} {
		errs := validateEndpoints(endpoints(c.f), nil)
		if c.what == "not an address" {
			if len(errs) != 2 || errs[0].Field != "subsets[0].addresses[0].ip" {
				t.Errorf("%s: %v", c.what, errs)
			}
			continue
		}
		check(t, c.what, errs, c.want)
	}
	for ip, want := range special {
		e := endpoints(func(e *corev1.Endpoints) { sub(e).Addresses[0].IP = ip })
		check(t, ip, validateEndpoints(e, nil), want)
		check(t, ip+" unchanged", validateEndpoints(e, e), "")
	}
}

func slice(f func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "my-service-abcde", Namespace: "default"},
		AddressType: "IPv4",
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.42"}}},
		Ports:       []discoveryv1.EndpointPort{{Port: new(int32(9376))}},
	}
	f(s)
	setSliceDefaults(s)
	return s
}

func TestSlices(t *testing.T) {
	ep := func(s *discoveryv1.EndpointSlice) *discoveryv1.Endpoint { return &s.Endpoints[0] }
	many := func(n int) func(*discoveryv1.EndpointSlice) {
		return func(s *discoveryv1.EndpointSlice) {
			s.Endpoints = nil
			for i := range n {
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.0.%d.%d", i/256, i%256)}})
			}
		}
	}
	for _, c := range []struct {
		what string
		f    func(*discoveryv1.EndpointSlice)
		want string
	}{
		{"plain", func(*discoveryv1.EndpointSlice) {}, ""},
		{"no type", func(s *discoveryv1.EndpointSlice) { s.AddressType = "" }, "addressType: Required value"},
		{"type", func(s *discoveryv1.EndpointSlice) { s.AddressType = "IPX" },
			`addressType: Unsupported value: "IPX": supported values: "FQDN", "IPv4", "IPv6"`},
		{"FQDN", func(s *discoveryv1.EndpointSlice) {
			s.AddressType = "FQDN"
			ep(s).Addresses = []string{"a.example.com"}
		}, ""},
		{"IPv6 in IPv4", func(s *discoveryv1.EndpointSlice) { ep(s).Addresses = []string{"2001:db8::1"} },
			`endpoints[0].addresses: Invalid value: "2001:db8::1": must be an IPv4 address`},
		{"IPv4 in IPv6", func(s *discoveryv1.EndpointSlice) { s.AddressType = "IPv6" },
			`endpoints[0].addresses: Invalid value: "192.0.2.42": must be an IPv6 address`},
		{"no addresses", func(s *discoveryv1.EndpointSlice) { ep(s).Addresses = nil },
			"endpoints[0].addresses: Required value"},
		{"1000 endpoints (behaviour 28)", many(1000), ""},
		{"1001 endpoints (behaviour 28)", many(1001), "endpoints: Too many: 1001: must have at most 1000 items"},
		{"two ports of one name", func(s *discoveryv1.EndpointSlice) {
			s.Ports = append(s.Ports, discoveryv1.EndpointPort{Port: new(int32(1))})
		}, `ports[1].name: Duplicate value: ""`},
		{"port name", func(s *discoveryv1.EndpointSlice) { s.Ports[0].Name = new("A") }, `ports[0].name: Invalid value: "A"`},
		{"hints", func(s *discoveryv1.EndpointSlice) {
			ep(s).Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}, {Name: "a"}}}
		}, `endpoints[0].hints.forZones[1].name: Duplicate value: "a"`},
	} {
		check(t, c.what, validateSlice(slice(c.f), nil), c.want)
	}
	for ip, want := range special {
		s := slice(func(s *discoveryv1.EndpointSlice) {
			if ep(s).Addresses[0] = ip; strings.Contains(ip, ":") {
				s.AddressType = "IPv6"
			}
		})
		check(t, ip, validateSlice(s, nil), want)
	}
}

func TestSliceUpdates(t *testing.T) {
	st := sliceRules().Strategy()
	old := slice(func(s *discoveryv1.EndpointSlice) { s.Generation, s.ResourceVersion = 3, "1" })
	for _, c := range []struct {
		what string
		f    func(*discoveryv1.EndpointSlice)
		want int64
	}{
		{"nothing", func(*discoveryv1.EndpointSlice) {}, 3},
		{"an annotation", func(s *discoveryv1.EndpointSlice) { s.Annotations = map[string]string{"a": "b"} }, 3},
		{"a label", func(s *discoveryv1.EndpointSlice) { s.Labels = map[string]string{"kubernetes.io/service-name": "x"} }, 4},
		{"an endpoint", func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Conditions.Ready = new(false) }, 4},
	} {
		s := old.DeepCopy()
		s.Generation = 99 // the client's does not count
		c.f(s)
		if st.PrepareForUpdate(t.Context(), s, old); s.Generation != c.want {
			t.Errorf("%s: generation %d, want %d", c.what, s.Generation, c.want)
		}
	}
	s := old.DeepCopy()
	s.AddressType, s.Endpoints = "IPv6", nil
	check(t, "address type", st.ValidateUpdate(t.Context(), s, old), "addressType: Invalid value: \"IPv6\": field is immutable")
}

func TestTexts(t *testing.T) {
	e := endpoints(func(e *corev1.Endpoints) {
		for _, ip := range []string{"192.0.2.43", "2001:db8::1", "192.0.2.45"} {
			e.Subsets[0].Addresses = append(e.Subsets[0].Addresses, corev1.EndpointAddress{IP: ip})
		}
	})
	if got, want := endpointsText(e), "192.0.2.42:9376,192.0.2.43:9376,[2001:db8::1]:9376 + 1 more..."; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := endpointsText(&corev1.Endpoints{}); got != "<none>" {
		t.Error(got)
	}
	s := slice(func(s *discoveryv1.EndpointSlice) {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: new("b")}, discoveryv1.EndpointPort{Port: new(int32(1))},
			discoveryv1.EndpointPort{Port: new(int32(2))})
	})
	if got, want := slicePortsText(s.Ports), "9376,b,1 + 1 more..."; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if slicePortsText(nil) != "<unset>" || sliceEndpointsText(nil) != "<unset>" || sliceEndpointsText(s.Endpoints) != "192.0.2.42" {
		t.Error("texts of slices")
	}
}
