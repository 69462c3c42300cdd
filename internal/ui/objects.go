package ui

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asking"
)

const (
	// objectsKept is for how long a list counts: a page watches from its version on.
	objectsKept = 2 * time.Second
	// objectsPage is how many objects one request reads.
	objectsPage = 2000
	// writesSince is how old a write may be that the page shows.
	writesSince = time.Hour
)

// objectList is a list as the page needs it: objects in the form of the API, with some of their fields, and who wrote them.
type objectList struct {
	// ResourceVersion is the version of the list, from which a watch goes on.
	ResourceVersion string `json:"resourceVersion"`
	// Writes are what objectMeta.Writes names by its place.
	Writes []write `json:"writes"`
	Items  []any   `json:"items"`
}

// write is a writer of an object, and what it wrote.
type write struct {
	Who string `json:"who"`
	// How is Apply or Update.
	How string `json:"how"`
	// Part is the subresource, empty for the object itself.
	Part string `json:"part"`
	// Fields names the first fields, such as spec.ports.
	Fields string `json:"fields"`
}

type objectMeta struct {
	Namespace         string            `json:"namespace"`
	Name              string            `json:"name"`
	ResourceVersion   string            `json:"resourceVersion"`
	Generation        int64             `json:"generation,omitempty"`
	CreationTimestamp *metav1.Time      `json:"creationTimestamp,omitempty"`
	Labels            map[string]string `json:"labels,omitempty"`
	// Writes are the writes of the last hour: the time in seconds, and the place in objectList.Writes.
	Writes [][2]int64 `json:"writes,omitempty"`
}

type serviceObject struct {
	Metadata objectMeta    `json:"metadata"`
	Spec     serviceSpec   `json:"spec"`
	Status   serviceStatus `json:"status"`
}

type serviceSpec struct {
	Type                  corev1.ServiceType                   `json:"type"`
	ClusterIPs            []string                             `json:"clusterIPs,omitempty"`
	ExternalIPs           []string                             `json:"externalIPs,omitempty"`
	ExternalName          string                               `json:"externalName,omitempty"`
	Ports                 []corev1.ServicePort                 `json:"ports,omitempty"`
	Selector              map[string]string                    `json:"selector,omitempty"`
	InternalTrafficPolicy *corev1.ServiceInternalTrafficPolicy `json:"internalTrafficPolicy,omitempty"`
	ExternalTrafficPolicy corev1.ServiceExternalTrafficPolicy  `json:"externalTrafficPolicy,omitempty"`
}

type serviceStatus struct {
	LoadBalancer corev1.LoadBalancerStatus `json:"loadBalancer"`
}

type sliceObject struct {
	Metadata    objectMeta              `json:"metadata"`
	AddressType discoveryv1.AddressType `json:"addressType"`
	Ports       []slicePort             `json:"ports,omitempty"`
	Endpoints   []endpointObject        `json:"endpoints,omitempty"`
}

type slicePort struct {
	Port *int32 `json:"port,omitempty"`
}

// endpointObject has the first address. Conditions are missing of an endpoint that is ready.
type endpointObject struct {
	Addresses  []string            `json:"addresses"`
	Conditions *endpointConditions `json:"conditions,omitempty"`
	NodeName   *string             `json:"nodeName,omitempty"`
	TargetRef  *endpointTarget     `json:"targetRef,omitempty"`
}

type endpointConditions struct {
	Ready       *bool `json:"ready,omitempty"`
	Terminating *bool `json:"terminating,omitempty"`
}

type endpointTarget struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
}

// listing makes an objectList.
type listing struct {
	out   objectList
	since time.Time
	known map[string]int64 // the places of writes, by all that makes them
}

func newListing(now time.Time) *listing {
	return &listing{out: objectList{Writes: []write{}, Items: []any{}}, since: now.Add(-writesSince), known: map[string]int64{}}
}

func (l *listing) meta(o *metav1.ObjectMeta) objectMeta {
	m := objectMeta{Namespace: o.Namespace, Name: o.Name, ResourceVersion: o.ResourceVersion, Generation: o.Generation}
	for i := range o.ManagedFields {
		f := &o.ManagedFields[i]
		if f.Time == nil || f.Time.Before(&metav1.Time{Time: l.since}) {
			continue
		}
		m.Writes = append(m.Writes, [2]int64{f.Time.Unix(), l.place(f)})
	}
	return m
}

// place returns the place of a write. Most objects have the writes of others.
func (l *listing) place(f *metav1.ManagedFieldsEntry) int64 {
	var raw []byte
	if f.FieldsV1 != nil {
		raw = f.FieldsV1.GetRawBytes()
	}
	key := f.Manager + "\x00" + string(f.Operation) + "\x00" + f.Subresource + "\x00" + string(raw)
	at, ok := l.known[key]
	if !ok {
		at = int64(len(l.out.Writes))
		l.known[key] = at
		l.out.Writes = append(l.out.Writes, write{f.Manager, string(f.Operation), f.Subresource, fieldNames(raw)})
	}
	return at
}

// maxFields is how many fields a write names.
const maxFields = 6

// fieldNames are the names two levels down, such as spec.ports, the ones of spec first, as the page makes them of an object.
func fieldNames(raw []byte) string {
	var fields map[string]map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil {
		return ""
	}
	var own, others []string
	for _, top := range slices.Sorted(maps.Keys(fields)) {
		for _, below := range slices.Sorted(maps.Keys(fields[top])) {
			name, ok := strings.CutPrefix(below, "f:")
			if !ok {
				continue
			}
			name = strings.TrimPrefix(top, "f:") + "." + name
			if strings.HasPrefix(name, "spec.") {
				own = append(own, name)
			} else {
				others = append(others, name)
			}
		}
	}
	all := append(own, others...)
	return strings.Join(all[:min(len(all), maxFields)], ", ")
}

func (l *listing) service(s *corev1.Service) {
	o := &serviceObject{Metadata: l.meta(&s.ObjectMeta), Spec: serviceSpec{
		Type: s.Spec.Type, ClusterIPs: s.Spec.ClusterIPs, ExternalIPs: s.Spec.ExternalIPs, ExternalName: s.Spec.ExternalName, Ports: s.Spec.Ports,
		Selector: s.Spec.Selector, InternalTrafficPolicy: s.Spec.InternalTrafficPolicy, ExternalTrafficPolicy: s.Spec.ExternalTrafficPolicy,
	}, Status: serviceStatus{s.Status.LoadBalancer}}
	o.Metadata.CreationTimestamp = &s.CreationTimestamp
	l.out.Items = append(l.out.Items, o)
}

func (l *listing) slice(s *discoveryv1.EndpointSlice) {
	o := &sliceObject{Metadata: l.meta(&s.ObjectMeta), AddressType: s.AddressType}
	if name := s.Labels[discoveryv1.LabelServiceName]; name != "" {
		o.Metadata.Labels = map[string]string{discoveryv1.LabelServiceName: name}
	}
	for i := range s.Ports {
		o.Ports = append(o.Ports, slicePort{s.Ports[i].Port})
	}
	o.Endpoints = make([]endpointObject, len(s.Endpoints))
	for i := range s.Endpoints {
		e, to := &s.Endpoints[i], &o.Endpoints[i]
		to.Addresses, to.NodeName = e.Addresses[:min(1, len(e.Addresses))], e.NodeName
		if c := e.Conditions; c.Ready != nil && !*c.Ready || c.Terminating != nil && *c.Terminating {
			to.Conditions = &endpointConditions{c.Ready, c.Terminating}
		}
		if r := e.TargetRef; r != nil {
			to.TargetRef = &endpointTarget{r.Kind, r.Name}
		}
	}
	l.out.Items = append(l.out.Items, o)
}

// packed is JSON, compressed by gzip: so it is kept, and sent to a browser.
type packed []byte

func pack(v any) (packed, error) {
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestSpeed) // the level is a valid one
	if err := errors.Join(json.NewEncoder(z).Encode(v), z.Close()); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// write sends it, uncompressed to a client that does not take gzip.
func (p packed) write(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Vary", "Accept-Encoding")
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Encoding", "gzip")
		h.Set("Content-Length", fmt.Sprint(len(p)))
		_, _ = w.Write(p) // the client is gone
		return
	}
	if z, err := gzip.NewReader(bytes.NewReader(p)); err == nil { // pack has written it
		_, _ = io.Copy(w, z) //nolint:gosec // this program has compressed it; an error is of a client that is gone
	}
}

// objects reads a list with the rights of the user, page by page.
func objects(ctx context.Context, nodes *asking.Nodes, p url.Values) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	l := newListing(time.Now())
	read := map[string]func(metav1.ListOptions) (*metav1.ListMeta, error){
		"services": func(o metav1.ListOptions) (*metav1.ListMeta, error) {
			list, err := nodes.Client().CoreV1().Services(p.Get("namespace")).List(ctx, o)
			if err != nil {
				return nil, err
			}
			for i := range list.Items {
				l.service(&list.Items[i])
			}
			return &list.ListMeta, nil
		},
		"endpointslices": func(o metav1.ListOptions) (*metav1.ListMeta, error) {
			list, err := nodes.Client().DiscoveryV1().EndpointSlices(p.Get("namespace")).List(ctx, o)
			if err != nil {
				return nil, err
			}
			for i := range list.Items {
				l.slice(&list.Items[i])
			}
			return &list.ListMeta, nil
		},
	}[p.Get("kind")]
	if read == nil {
		return nil, fmt.Errorf("kind is %q; want services or endpointslices", p.Get("kind"))
	}
	o := metav1.ListOptions{Limit: objectsPage}
	for {
		m, err := read(o)
		if err != nil {
			return nil, err
		}
		if o.Continue = m.Continue; o.Continue == "" {
			l.out.ResourceVersion = m.ResourceVersion
			return pack(&l.out)
		}
	}
}
