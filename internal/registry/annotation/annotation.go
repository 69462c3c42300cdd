// Package annotation knows which kinds read which annotations of the domain fairlead.dev, and warns of one that has no
// effect: unknown, on a kind that does not read it, or with a value that means nothing. It warns of
// labels whose key is an annotation's, or nearly that of a label that is read.
package annotation

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/barrier"
	"github.com/fairlead/fairlead/internal/checks"
	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/dialect/nginx"
	"github.com/fairlead/fairlead/internal/gateway/fronts"
	"github.com/fairlead/fairlead/internal/gateway/policy"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/svc"
)

// Bounds of the warnings about one object, and of the work for them: a client shows them.
const (
	maxWarnings = 5
	maxKey      = 200
	// maxSlip is how many letters may be wrong in a key for which another one is meant.
	maxSlip = 3
)

const prefix = svc.Domain + "/"

// reader is who reads an annotation.
type reader struct {
	kinds []string
	// wrong returns what is wrong with a value, "" if nothing is. Nil where another place checks it, or every value counts.
	wrong func(value string) string
}

// readers has every annotation of an object of the API, and who reads it. Those of load balancers are in package dialect.
var readers = map[string]reader{
	svc.ClaimServicesAnnotation:   {[]string{"IPAddress"}, nil},
	svc.ClaimPoolAnnotation:       {[]string{"IPAddress", "Service"}, nil},
	fronts.Annotation:             {[]string{"Ingress"}, nil}, // package networking warns of its values
	svc.FrontSecretsAnnotation:    {[]string{"Service"}, nil},
	svc.FrontOrdersAnnotation:     {[]string{"Service"}, nil},
	dialect.ACME:                  {[]string{"Gateway", "Ingress", "ListenerSet"}, challenge},
	svc.MaintenanceAnnotation:     {[]string{"HTTPRoute", "GRPCRoute", "Ingress"}, maintenance},
	svc.FrontConfigMapsAnnotation: {[]string{"Service"}, nil},
	svc.FrontKeysAnnotation:       {[]string{"Service"}, nil},
	svc.LBWeightAnnotation:        {[]string{"EndpointSlice", "Endpoints"}, weight},
	svc.ACMEIssuedAnnotation:      {[]string{"Secret"}, nil},
	svc.ACMERetryAnnotation:       {[]string{"Secret"}, nil},
	svc.ACMEFailuresAnnotation:    {[]string{"Secret"}, nil},
	svc.ACMEHostsAnnotation:       {[]string{"Secret"}, nil},
	svc.DNSPhaseAnnotation:        {[]string{"Deployment"}, nil},
	svc.LBPhaseAnnotation:         {[]string{"DaemonSet"}, nil},
	svc.LBReplicasAnnotation:      {[]string{"DaemonSet"}, nil},
	svc.LBFailureAnnotation:       {[]string{"DaemonSet"}, nil},
	svc.DNSReplicasAnnotation:     {[]string{"Deployment"}, nil},
	svc.DNSFailureAnnotation:      {[]string{"Deployment"}, nil},
	svc.ProxyFailureAnnotation:    {[]string{"Node"}, nil},
	svc.EndpointAnnotation:        {[]string{"Lease"}, nil},
	svc.DefaultQuotaAnnotation:    {[]string{"Namespace"}, only(svc.DefaultQuotaNone)},
	svc.ServingCertAnnotation:     {[]string{"Node"}, nil},
	svc.AuthoritiesAnnotation:     {[]string{"Node", "Lease"}, nil},
	svc.JoiningAnnotation:         {[]string{"Lease"}, nil},
	svc.NodeAddressesAnnotation:   {[]string{"Node"}, nil},
	svc.PublicKeyAnnotation:       {[]string{"Node"}, nil},
	svc.PeerWatchAnnotation:       {[]string{"Node"}, nil},
	svc.SuspectedAnnotation:       {[]string{"Node"}, nil},
	svc.UnreachableAnnotation:     {[]string{"Lease"}, nil},
	svc.PodSecurityAnnotation:     {[]string{"Pod"}, nil},
	svc.UnitAnnotation:            {[]string{"Pod"}, nil},
	svc.PIDFileAnnotation:         {[]string{"Pod"}, nil},
	svc.AddressAnnotation:         {[]string{"Pod"}, nil},
	svc.ServicesFileAnnotation:    {[]string{"Pod"}, nil},
	svc.EvictedAnnotation:         {[]string{"Pod"}, nil},
	svc.DrainAnnotation:           {[]string{"Pod"}, only(svc.DrainOff, svc.DrainOn)},
	svc.ProgramsAnnotation:        {[]string{"Pod"}, programs},
	svc.SchedulerAnnotation:       {[]string{"Service"}, only(svc.Schedulers()...)},
	dialect.LBCompress:            {[]string{"Ingress", "Service"}, compress},
	svc.ForwardingAnnotation:      {[]string{"Service"}, only(svc.ForwardingNAT, svc.ForwardingDirect)},
	svc.WeightAnnotation:          {[]string{"Pod", "EndpointSlice", "Endpoints"}, weight},
	svc.CheckAnnotation:           {[]string{"EndpointSlice"}, nil},
	checks.IntervalAnnotation:     {[]string{"EndpointSlice"}, nil},
	checks.TimeoutAnnotation:      {[]string{"EndpointSlice"}, nil},
	svc.ChecksAnnotation:          {[]string{"Lease"}, nil},
	barrier.WantedAnnotation:      {[]string{"Lease"}, nil},
	barrier.ProgrammedAnnotation:  {[]string{"Lease"}, nil},
	barrier.RejectedAnnotation:    {[]string{"Lease"}, nil},
	barrier.DrainsAnnotation:      {[]string{"Lease"}, nil},
	barrier.AskAnnotation:         {[]string{"Service"}, only("true", "false")},
}

// labels are names of the domain that count as labels only.
var labels = []string{svc.DNSServerLabel, svc.NodeLabel, svc.CheckedLabel, svc.RemovedNodeLabel}

func weight(value string) string {
	if _, ok := svc.ParseWeight(value); ok {
		return ""
	}
	return fmt.Sprintf("want a number from 0 to %d; it counts as 1", svc.MaxWeight)
}

func compress(value string) string {
	if _, err := dialect.ReadEncodings(value); err != nil {
		return err.Error()
	}
	return ""
}

func maintenance(value string) string {
	_, wrong := policy.ReadMaintenance(value)
	return wrong
}

func challenge(value string) string {
	if _, err := dialect.ReadACME(value); value != "" && err != nil {
		return err.Error()
	}
	return ""
}

func programs(value string) string {
	if _, err := podspec.ParsePrograms(value); err != nil {
		return err.Error()
	}
	return ""
}

func only(values ...string) func(string) string {
	return func(value string) string {
		if value == "" || slices.Contains(values, strings.TrimSpace(value)) {
			return ""
		}
		return "it has no effect; want one of " + strings.Join(values, ", ")
	}
}

// Warnings returns which annotations of an object of a kind have no effect. An annotation that the object had before with the same
// value is left out: its writer has been warned. at is where the annotations stand.
func Warnings(kind string, at *field.Path, now, before map[string]string) (out []string) {
	own, canary := false, false // such an Ingress gives its front what is for load balancers
	var refused []string        // what the front does not take
	if kind == "Ingress" {
		if own, _ = fronts.Read(now); own {
			_, refused = dialect.OfFront(now)
		}
		if canary = nginx.Read(now).Canary != nil; canary != (nginx.Read(before).Canary != nil) {
			before = maps.Clone(before) // what it has for all requests has lost its effect, or has one again
			delete(before, svc.MaintenanceAnnotation)
		}
	}
	return warn(at, now, before, func(key, value string) string {
		if slices.Contains(refused, key) {
			return "it has no effect: the Ingress has the protocols, certificates and paths of its front"
		}
		if own && key != dialect.LBCompress && slices.Contains(dialect.OwnKeys(), key) {
			return ""
		}
		if key == svc.MaintenanceAnnotation && canary {
			_, wrong := policy.ReadMaintenanceOf(value, true)
			return wrong
		}
		return noEffect(kind, key, value)
	})
}

// LabelWarnings returns which labels of an object have no effect and were probably meant to have one: an annotation's key, or
// nearly that of a label that fairlead reads. Labels that the object had before are left out. at is where the labels stand.
func LabelWarnings(at *field.Path, now, before map[string]string) []string {
	return warn(at, now, before, func(key, _ string) string { return noLabel(key) })
}

func warn(at *field.Path, now, before map[string]string, wrong func(key, value string) string) (out []string) {
	var keys []string
	for key, value := range now {
		if was, had := before[key]; strings.HasPrefix(key, prefix) && (!had || was != value) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	for _, key := range keys {
		why := wrong(key, now[key])
		if why == "" {
			continue
		}
		if len(out) == maxWarnings {
			return append(out, fmt.Sprintf("%s: more keys of %s have no effect", at, svc.Domain))
		}
		out = append(out, fmt.Sprintf("%s: %s", at.Key(shorten(key)), why))
	}
	return out
}

// noLabel returns why a label has no effect and was meant to have one, "" otherwise.
func noLabel(key string) string {
	_, read := readers[key]
	switch {
	case slices.Contains(labels, key):
		return ""
	case read || slices.Contains(dialect.OwnKeys(), key):
		return "it is an annotation, and has no effect as a label"
	case len(key) > maxKey:
		return ""
	}
	if m := dialect.Nearest(key, labels, maxSlip); m != "" {
		return "unknown label; did you mean " + m + "?"
	}
	return ""
}

// noEffect returns why an annotation has no effect on an object of a kind, "" if it has.
func noEffect(kind, key, value string) string {
	r, known := readers[key]
	switch {
	case key == dialect.LBCompress && kind == "Service": // package service warns of it
		return ""
	case known && slices.Contains(r.kinds, kind):
		if r.wrong == nil {
			return ""
		}
		if why := r.wrong(value); why != "" {
			return fmt.Sprintf("%q: %s", shorten(value), why)
		}
		return ""
	case known:
		return notOf(kind, r.kinds)
	case dialect.IsOwn(key) && kind == "Service": // package service warns of them
		return ""
	case dialect.IsOwn(key) && slices.Contains(dialect.OwnKeys(), key):
		return notOf(kind, []string{"Service"})
	case slices.Contains(labels, key):
		return "it is a label, and has no effect as an annotation"
	}
	return "unknown annotation" + meant(key)
}

// notOf says that a kind does not read an annotation of others.
func notOf(kind string, kinds []string) string {
	where := strings.Join(kinds, " or ")
	if kinds[0] == "Pod" && (kind == "Deployment" || kind == "DaemonSet" || kind == "ReplicaSet") {
		return "it has no effect on a " + kind + "; write it to spec.template.metadata.annotations, from which its Pods get it"
	}
	if kind == "Gateway" && slices.Contains(kinds, "Service") {
		return "it has no effect on a Gateway; write it to spec.infrastructure.annotations, from which its Service gets it"
	}
	return fmt.Sprintf("it has no effect on kind %s; it is for kind %s", kind, where)
}

// meant returns which annotation may have been meant, as the end of a sentence.
func meant(key string) string {
	if len(key) > maxKey {
		return ""
	}
	known := slices.Concat(slices.Sorted(maps.Keys(readers)), dialect.OwnKeys())
	if m := dialect.Nearest(key, known, maxSlip); m != "" {
		return "; did you mean " + m + "?"
	}
	return ""
}

// shorten returns as much of a key or value as a warning repeats.
func shorten(s string) string {
	if len(s) > maxKey {
		return strings.ToValidUTF8(s[:maxKey], "") + "..."
	}
	return s
}
