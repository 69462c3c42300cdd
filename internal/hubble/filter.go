package hubble

import (
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/fairlead/fairlead/internal/hubble/api/flow"
)

// Filter decides which flows a client gets.
type Filter struct{ allow, deny []func(*flow.Flow) bool }

// maxFilterValues bounds the values in all filters of a request.
const maxFilterValues = 1000

// NewFilter returns the Filter of a request's lists. It rejects filters by what flows of this server never have: nothing would
// match them, or as a deny list everything would pass.
func NewFilter(whitelist, blacklist []*flow.FlowFilter) (*Filter, error) {
	out := &Filter{}
	values, instructions := 0, 0
	for _, list := range []struct {
		name    string
		filters []*flow.FlowFilter
		to      *[]func(*flow.Flow) bool
	}{{"whitelist", whitelist, &out.allow}, {"blacklist", blacklist, &out.deny}} {
		for i, f := range list.filters {
			size, err := programs(f)
			if err != nil {
				return nil, fmt.Errorf("%s[%d]%w", list.name, i, err)
			}
			if instructions += size; instructions > maxPrograms {
				return nil, fmt.Errorf("%s[%d]: the regular expressions of the filters compile to more than %d instructions",
					list.name, i, maxPrograms)
			}
			match, n, err := compile(f)
			if err != nil {
				return nil, fmt.Errorf("%s[%d]%w", list.name, i, err)
			}
			if values += n; values > maxFilterValues {
				return nil, fmt.Errorf("%s[%d]: the filters have more than %d values", list.name, i, maxFilterValues)
			}
			*list.to = append(*list.to, match)
		}
	}
	return out, nil
}

// Has reports whether a client gets a flow.
func (f *Filter) Has(m *flow.Flow) bool {
	match := func(one func(*flow.Flow) bool) bool { return one(m) }
	return (len(f.allow) == 0 || slices.ContainsFunc(f.allow, match)) && !slices.ContainsFunc(f.deny, match)
}

// compile returns a function that reports whether a flow has what each field of f asks for, and the number of values in f. The
// error goes on the name of the list.
func compile(f *flow.FlowFilter) (func(*flow.Flow) bool, int, error) {
	if len(f.ProtoReflect().GetUnknown()) > 0 {
		return nil, 0, fmt.Errorf(": it has a field that this server does not know")
	}
	var all []func(*flow.Flow) bool
	var err error
	values := 0
	f.ProtoReflect().Range(func(d protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		name := string(d.Name())
		make, known := fields()[name]
		if !known {
			err = fmt.Errorf(".%s: flows of this server do not have that; they have %s", name, strings.Join(fieldNames(), ", "))
			return false
		}
		match, e := make(f)
		if e != nil {
			err = fmt.Errorf(".%s: %w", name, e)
			return false
		}
		values += v.List().Len()
		all = append(all, match)
		return true
	})
	if err != nil {
		return nil, 0, err
	}
	return func(m *flow.Flow) bool {
		return !slices.ContainsFunc(all, func(one func(*flow.Flow) bool) bool { return !one(m) })
	}, values, nil
}

// matcher makes the function for one field of a filter.
type matcher func(*flow.FlowFilter) (func(*flow.Flow) bool, error)

// fieldNames are the fields of filters that flows can match, sorted.
func fieldNames() []string {
	var out []string
	for name := range fields() {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// fields are the makers of filters by the fields of FlowFilter. Several values of a field are alternatives.
func fields() map[string]matcher {
	type ff = *flow.FlowFilter
	type mf = *flow.Flow
	all := map[string]matcher{
		"uuid":                 among(ff.GetUuid, func(m mf) string { return m.GetUuid() }),
		"source_ip":            inRange(ff.GetSourceIp, func(m mf) string { return m.GetIP().GetSource() }),
		"source_ip_xlated":     inRange(ff.GetSourceIpXlated, func(m mf) string { return m.GetIP().GetSourceXlated() }),
		"destination_ip":       inRange(ff.GetDestinationIp, func(m mf) string { return m.GetIP().GetDestination() }),
		"source_pod":           named(ff.GetSourcePod, func(m mf) (string, string) { return podOf(m.GetSource()) }),
		"destination_pod":      named(ff.GetDestinationPod, func(m mf) (string, string) { return podOf(m.GetDestination()) }),
		"source_service":       named(ff.GetSourceService, func(m mf) (string, string) { return serviceOf(m.GetSourceService()) }),
		"destination_service":  named(ff.GetDestinationService, func(m mf) (string, string) { return serviceOf(m.GetDestinationService()) }),
		"source_label":         labelled(ff.GetSourceLabel, func(m mf) []string { return m.GetSource().GetLabels() }),
		"destination_label":    labelled(ff.GetDestinationLabel, func(m mf) []string { return m.GetDestination().GetLabels() }),
		"source_workload":      worked(ff.GetSourceWorkload, mf.GetSource),
		"destination_workload": worked(ff.GetDestinationWorkload, mf.GetDestination),
		"source_identity":      among(ff.GetSourceIdentity, func(m mf) uint32 { return m.GetSource().GetIdentity() }),
		"destination_identity": among(ff.GetDestinationIdentity, func(m mf) uint32 { return m.GetDestination().GetIdentity() }),
		"source_port":          ported(ff.GetSourcePort, func(m mf) uint32 { from, _ := portsOf(m); return from }),
		"destination_port":     ported(ff.GetDestinationPort, func(m mf) uint32 { _, to := portsOf(m); return to }),
		"traffic_direction":    among(ff.GetTrafficDirection, mf.GetTrafficDirection),
		"verdict":              among(ff.GetVerdict, mf.GetVerdict),
		"drop_reason_desc":     among(ff.GetDropReasonDesc, mf.GetDropReasonDesc),
		"ip_version":           among(ff.GetIpVersion, func(m mf) flow.IPVersion { return m.GetIP().GetIpVersion() }),
		"reply":                among(ff.GetReply, func(m mf) bool { return m.GetIsReply().GetValue() }),
		"protocol":             protocols,
		"tcp_flags":            tcpFlags,
		"event_type":           eventTypes,
		"node_name":            nodeNames,
	}
	maps.Copy(all, l7Fields())
	return all
}

// among matches flows whose value is one of the filter's.
func among[T comparable](want func(*flow.FlowFilter) []T, of func(*flow.Flow) T) matcher {
	return func(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
		values := want(f)
		return func(m *flow.Flow) bool { return slices.Contains(values, of(m)) }, nil
	}
}

// inRange matches flows whose address is one of the filter's, or in one of its ranges.
func inRange(want func(*flow.FlowFilter) []string, of func(*flow.Flow) string) matcher {
	return func(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
		var ranges []netip.Prefix
		for _, text := range want(f) {
			p, err := netip.ParsePrefix(text)
			if a, e := netip.ParseAddr(text); e == nil {
				p, err = netip.PrefixFrom(a.Unmap().WithZone(""), a.Unmap().BitLen()), nil
			}
			if err != nil {
				return nil, fmt.Errorf("%q is not an IP address or a range such as 10.244.0.0/16", text)
			}
			ranges = append(ranges, p)
		}
		return func(m *flow.Flow) bool {
			a, err := netip.ParseAddr(of(m))
			return err == nil && slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(a) })
		}, nil
	}
}

// named matches flows by [NAMESPACE/]PREFIX, in namespace default without one. Both may be empty.
func named(want func(*flow.FlowFilter) []string, of func(*flow.Flow) (namespace, name string)) matcher {
	return func(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
		type pattern struct{ namespace, prefix string }
		var patterns []pattern
		for _, text := range want(f) {
			namespace, prefix, both := strings.Cut(text, "/")
			if !both {
				namespace, prefix = "default", text
			}
			if text == "" {
				return nil, fmt.Errorf("a name is empty; want [NAMESPACE/]NAME")
			}
			patterns = append(patterns, pattern{namespace, prefix})
		}
		return func(m *flow.Flow) bool {
			namespace, name := of(m)
			return name != "" && slices.ContainsFunc(patterns, func(p pattern) bool {
				return (p.namespace == "" || p.namespace == namespace) && strings.HasPrefix(name, p.prefix)
			})
		}, nil
	}
}

func podOf(e *flow.Endpoint) (namespace, name string)    { return e.GetNamespace(), e.GetPodName() }
func serviceOf(s *flow.Service) (namespace, name string) { return s.GetNamespace(), s.GetName() }

// worked matches flows by the workload of a Pod: its kind, its name, or both.
func worked(want func(*flow.FlowFilter) []*flow.Workload, of func(*flow.Flow) *flow.Endpoint) matcher {
	return func(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
		values := want(f)
		return func(m *flow.Flow) bool {
			return slices.ContainsFunc(of(m).GetWorkloads(), func(w *flow.Workload) bool {
				return slices.ContainsFunc(values, func(v *flow.Workload) bool {
					return (v.GetName() == "" || v.GetName() == w.GetName()) && (v.GetKind() == "" || v.GetKind() == w.GetKind())
				})
			})
		}, nil
	}
}

func portsOf(m *flow.Flow) (from, to uint32) {
	switch l := m.GetL4().GetProtocol().(type) {
	case *flow.Layer4_TCP:
		return l.TCP.GetSourcePort(), l.TCP.GetDestinationPort()
	case *flow.Layer4_UDP:
		return l.UDP.GetSourcePort(), l.UDP.GetDestinationPort()
	case *flow.Layer4_SCTP:
		return l.SCTP.GetSourcePort(), l.SCTP.GetDestinationPort()
	}
	return 0, 0
}

func ported(want func(*flow.FlowFilter) []string, of func(*flow.Flow) uint32) matcher {
	return func(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
		var ports []uint32
		for _, text := range want(f) {
			n, err := strconv.ParseUint(text, 10, 16)
			if err != nil || n == 0 {
				return nil, fmt.Errorf("%q is not a port from 1 to 65535", text)
			}
			ports = append(ports, uint32(n))
		}
		return func(m *flow.Flow) bool { return m.GetL4() != nil && slices.Contains(ports, of(m)) }, nil
	}
}

func protocols(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
	var want []string
	for _, p := range f.GetProtocol() {
		if p = strings.ToLower(p); !slices.Contains([]string{"tcp", "udp", "sctp", "http", "dns"}, p) {
			return nil, fmt.Errorf("%q is not tcp, udp, sctp, http or dns, which are the protocols of flows", p)
		}
		want = append(want, p)
	}
	return func(m *flow.Flow) bool {
		switch m.GetL7().GetRecord().(type) {
		case *flow.Layer7_Http:
			if slices.Contains(want, "http") {
				return true
			}
		case *flow.Layer7_Dns:
			if slices.Contains(want, "dns") {
				return true
			}
		}
		switch m.GetL4().GetProtocol().(type) {
		case *flow.Layer4_TCP:
			return slices.Contains(want, "tcp")
		case *flow.Layer4_UDP:
			return slices.Contains(want, "udp")
		case *flow.Layer4_SCTP:
			return slices.Contains(want, "sctp")
		}
		return false
	}, nil
}

// tcpFlags matches flows of TCP that have all flags of one of the values.
func tcpFlags(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
	return func(m *flow.Flow) bool {
		has := m.GetL4().GetTCP().GetFlags()
		return has != nil && slices.ContainsFunc(f.GetTcpFlags(), func(want *flow.TCPFlags) bool {
			missing := false
			want.ProtoReflect().Range(func(d protoreflect.FieldDescriptor, _ protoreflect.Value) bool { // of the flags that are set
				missing = missing || !has.ProtoReflect().Get(d).Bool()
				return true
			})
			return !missing
		})
	}, nil
}

func eventTypes(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
	return func(m *flow.Flow) bool {
		return slices.ContainsFunc(f.GetEventType(), func(t *flow.EventTypeFilter) bool {
			return t.GetType() == m.GetEventType().GetType() && (!t.GetMatchSubType() || t.GetSubType() == m.GetEventType().GetSubType())
		})
	}, nil
}

// nodeNames matches by patterns such as "node-*", which may have the name of the cluster before a slash.
func nodeNames(f *flow.FlowFilter) (func(*flow.Flow) bool, error) {
	var patterns []string
	for _, text := range f.GetNodeName() {
		cluster, name, both := strings.Cut(text, "/")
		if !both {
			cluster, name = "", text
		}
		if _, err := path.Match(name, ""); err != nil || cluster != "" && cluster != "*" && cluster != "default" {
			return nil, fmt.Errorf("%q is not a pattern such as node-* in the cluster default", text)
		}
		if name == "" {
			name = "*"
		}
		patterns = append(patterns, name)
	}
	return func(m *flow.Flow) bool {
		return slices.ContainsFunc(patterns, func(p string) bool {
			ok, _ := path.Match(p, m.GetNodeName()) // the patterns are valid
			return ok
		})
	}, nil
}
