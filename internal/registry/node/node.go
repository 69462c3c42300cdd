// Package node stores Nodes and reaches their agents.
package node

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/operation"
	declared "k8s.io/apimachinery/pkg/api/validate"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	unversioned "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"
	netutils "k8s.io/utils/net"

	"github.com/fairlead/fairlead/internal/registry/proxy"
	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages of Nodes by resource path, and how to reach
// the agents of the Nodes with the client certificate creds.
func NewStorage(opts generic.RESTOptionsGetter, creds AgentCredentials, log *slog.Logger) (map[string]rest.Storage, *Agents, error) {
	nodes := rules()
	r, err := store.New(store.Kind{
		Resource:   corev1.Resource("nodes"),
		Singular:   "node",
		ShortNames: []string{"no"},
		New:        store.Empty[corev1.Node],
		NewList:    store.Empty[corev1.NodeList],
		Strategy:   nodes.Strategy(),
		Attrs:      attrs,
		Table:      table(),
	}, opts)
	if err != nil {
		return nil, nil, err
	}
	keys, err := newKeys(opts, r, log)
	if err != nil {
		return nil, nil, err
	}
	r.AfterDelete = func(obj runtime.Object, options *metav1.DeleteOptions) {
		if !dryrun.IsDryRun(options.DryRun) {
			keys.hold(obj.(*corev1.Node))
		}
	}
	status := nodes.Sub(func(_ context.Context, n, _ *corev1.Node) field.ErrorList {
		return append(validateAddresses(n.Status.Addresses, field.NewPath("status", "addresses")), validate(n)...)
	}, store.Field("spec", func(n *corev1.Node) *corev1.NodeSpec { return &n.Spec }))
	agents := newAgents(r, creds)
	return map[string]rest.Storage{
		"nodes":        keyedREST{r, keys},
		"nodes/status": keyedStatus{store.NewSub(r, status.Strategy()), keys},
		"nodes/proxy":  proxy.New("node", &corev1.NodeProxyOptions{}, agents.locate),
	}, agents, nil
}

// AddToScheme adds what the kind needs beyond its types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddTypeDefaultingFunc(&corev1.Node{}, func(obj any) { setDefaults(obj.(*corev1.Node)) })
	return store.AddFieldLabels(s, corev1.SchemeGroupVersion.WithKind("Node"), "spec.unschedulable")
}

// setDefaults makes the old single podCIDR and the list agree, and takes what
// a node has for what it may give away.
func setDefaults(n *corev1.Node) {
	if n.Status.Allocatable == nil {
		n.Status.Allocatable = n.Status.Capacity.DeepCopy()
	}
	switch s := &n.Spec; {
	case s.PodCIDR != "" && (len(s.PodCIDRs) == 0 || s.PodCIDRs[0] != s.PodCIDR):
		s.PodCIDRs = []string{s.PodCIDR}
	case s.PodCIDR == "" && len(s.PodCIDRs) > 0:
		s.PodCIDR = s.PodCIDRs[0]
	}
}

func attrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	n := obj.(*corev1.Node)
	return n.Labels, fields.Set{"metadata.name": n.Name, "spec.unschedulable": fmt.Sprint(n.Spec.Unschedulable)}, nil
}

func table() rest.TableConvertor {
	status, info := corev1.NodeStatus{}.SwaggerDoc(), corev1.NodeSystemInfo{}.SwaggerDoc()
	return store.NewTable([]store.Column{
		{Name: "Status", Description: "The status of the node"},
		{Name: "Roles", Description: "The roles of the node"},
		store.AgeColumn(),
		{Name: "Version", Description: info["kubeletVersion"]},
		{Name: "Internal-IP", Wide: true, Description: status["addresses"]},
		{Name: "External-IP", Wide: true, Description: status["addresses"]},
		{Name: "OS-Image", Wide: true, Description: info["osImage"]},
		{Name: "Kernel-Version", Wide: true, Description: info["kernelVersion"]},
		{Name: "Container-Runtime", Wide: true, Description: info["containerRuntimeVersion"]},
	}, func(n *corev1.Node) []any {
		i := n.Status.NodeInfo
		return []any{
			statusText(n), roles(n), store.Age(n.CreationTimestamp), i.KubeletVersion,
			address(n, corev1.NodeInternalIP), address(n, corev1.NodeExternalIP),
			orUnknown(i.OSImage), orUnknown(i.KernelVersion), orUnknown(i.ContainerRuntimeVersion),
		}
	})
}

// statusText is Ready, NotReady or Unknown, and whether new pods may come.
func statusText(n *corev1.Node) string {
	s := "Unknown"
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			if s = "NotReady"; c.Status == corev1.ConditionTrue {
				s = "Ready"
			}
		}
	}
	if n.Spec.Unschedulable {
		s += ",SchedulingDisabled"
	}
	return s
}

func roles(n *corev1.Node) string {
	var out []string
	for k := range n.Labels {
		if r, ok := strings.CutPrefix(k, "node-role.kubernetes.io/"); ok && r != "" {
			out = append(out, r)
		} else if k == "kubernetes.io/role" && n.Labels[k] != "" {
			out = append(out, n.Labels[k])
		}
	}
	slices.Sort(out)
	return store.OrNone(strings.Join(slices.Compact(out), ","))
}

func address(n *corev1.Node, t corev1.NodeAddressType) string {
	for _, a := range n.Status.Addresses {
		if a.Type == t {
			return a.Address
		}
	}
	return "<none>"
}

func orUnknown(s string) string {
	if s == "" {
		return "<unknown>"
	}
	return s
}

func rules() store.Rules[*corev1.Node] {
	return store.Rules[*corev1.Node]{
		APIVersion: "v1", ClusterScoped: true, Name: validation.NameIsDNSSubdomain,
		Kept: []store.Part[*corev1.Node]{
			store.Field("status", func(n *corev1.Node) *corev1.NodeStatus { return &n.Status }),
		},
		KeptOnUpdateOnly: true, // agents register with their status
		Create: func(_ context.Context, n *corev1.Node) {
			// Kubernetes has dropped this source of the agent's configuration.
			n.Spec.ConfigSource, n.Status.Config = nil, nil //nolint:staticcheck // deprecated, and therefore dropped
		},
		Update: func(n, before *corev1.Node) {
			if before.Spec.ConfigSource == nil { //nolint:staticcheck // as above
				n.Spec.ConfigSource = nil //nolint:staticcheck // as above
			}
		},
		Validate: validateWrite,
		Warn:     func(n, _ *corev1.Node) []string { return warnings(n) },
	}
}

// validateWrite checks n as a replacement of before, nil on create.
func validateWrite(ctx context.Context, n, before *corev1.Node) field.ErrorList {
	if before == nil {
		return validate(n)
	}
	var errs field.ErrorList
	spec := field.NewPath("spec")
	if len(before.Spec.PodCIDRs) > 0 && !slices.Equal(n.Spec.PodCIDRs, before.Spec.PodCIDRs) {
		errs = append(errs, field.Forbidden(spec.Child("podCIDRs"), "node updates may not change podCIDR except from \"\" to valid"))
	}
	if n.Spec.ProviderID != before.Spec.ProviderID {
		errs = append(errs, declared.UpdateValueByCompare(ctx, operation.Operation{Type: operation.Update}, spec.Child("providerID"),
			&n.Spec.ProviderID, &before.Spec.ProviderID, declared.NoUnset, declared.NoModify)...)
	}
	errs = append(errs, validateAddresses(n.Status.Addresses, field.NewPath("status", "addresses"))...)
	return append(errs, validate(n)...)
}

// validateAddresses rejects duplicates. As in Kubernetes a new Node may have some.
func validateAddresses(addresses []corev1.NodeAddress, path *field.Path) (errs field.ErrorList) {
	seen := map[corev1.NodeAddress]bool{}
	for i, a := range addresses {
		if seen[a] {
			errs = append(errs, field.Duplicate(path.Index(i), a))
		}
		seen[a] = true
	}
	return errs
}

func warnings(n *corev1.Node) (out []string) {
	if n.Spec.ConfigSource != nil { //nolint:staticcheck // that it is deprecated is what this says
		out = append(out, "spec.configSource: the feature is removed")
	}
	if n.Spec.DoNotUseExternalID != "" {
		out = append(out, "spec.externalID: this field is deprecated, and is unused by Kubernetes")
	}
	for i, c := range n.Spec.PodCIDRs {
		out = append(out, utilvalidation.GetWarningsForCIDR(field.NewPath("spec", "podCIDRs").Index(i), c)...)
	}
	return out
}

func validate(n *corev1.Node) (errs field.ErrorList) {
	cidrs := field.NewPath("spec", "podCIDRs")
	for i, c := range n.Spec.PodCIDRs {
		errs = append(errs, utilvalidation.IsValidCIDRForLegacyField(cidrs.Index(i), c, true, nil)...)
	}
	if k := len(n.Spec.PodCIDRs); k > 1 {
		if dual, err := netutils.IsDualStackCIDRStrings(n.Spec.PodCIDRs); err != nil || !dual || k > 2 {
			errs = append(errs, field.Invalid(cidrs, n.Spec.PodCIDRs, "may specify no more than one CIDR for each IP family"))
		}
	}
	errs = append(errs, validateTaints(n.Spec.Taints, field.NewPath("metadata", "taints"))...) // the path is Kubernetes'
	errs = append(errs, validateResources(n.Status.Capacity, field.NewPath("status", "capacity"))...)
	return append(errs, validateResources(n.Status.Allocatable, field.NewPath("status", "allocatable"))...)
}

func validateResources(list corev1.ResourceList, path *field.Path) (errs field.ErrorList) {
	for _, k := range slices.Sorted(maps.Keys(list)) {
		if q := list[k]; q.Sign() < 0 {
			errs = append(errs, field.Invalid(path.Child(string(k)), q.String(), "must be greater than or equal to 0"))
		}
	}
	return errs
}

func validateTaints(taints []corev1.Taint, path *field.Path) (errs field.ErrorList) {
	effects := []corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute}
	type key struct {
		key    string
		effect corev1.TaintEffect
	}
	seen := map[key]bool{}
	for i, t := range taints {
		p := path.Index(i)
		errs = append(errs, unversioned.ValidateLabelName(t.Key, p.Child("key"))...)
		errs = append(errs, store.Invalids(p.Child("value"), t.Value, utilvalidation.IsValidLabelValue(t.Value))...)
		if t.Effect == "" {
			errs = append(errs, field.Required(p.Child("effect"), ""))
		} else if !slices.Contains(effects, t.Effect) {
			errs = append(errs, field.NotSupported(p.Child("effect"), t.Effect, effects))
		}
		if k := (key{t.Key, t.Effect}); seen[k] {
			dup := field.Duplicate(p, t)
			dup.Detail = "taints must be unique by key and effect pair"
			errs = append(errs, dup)
		} else {
			seen[k] = true
		}
	}
	return errs
}
