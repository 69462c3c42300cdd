package custom

import (
	"maps"
	"slices"
	"sync"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
)

// servedVersions lists the groups of custom resources at /apis, each with the
// versions that are served by now. The library's discovery controller adds the
// versions of a new definition one by one to the aggregated document, each when
// /apis/GROUP/VERSION answers; a list made from the definitions would name versions
// that are still 404, and clients of unaggregated discovery fail on those.
type servedVersions struct {
	aggregated.ResourceManager

	mu       sync.Mutex
	to       discovery.GroupManager     // nil before list
	builtIn  map[string]bool            // groups of built-in kinds
	versions map[string]map[string]bool // by group
}

func newServedVersions(m aggregated.ResourceManager) *servedVersions {
	return &servedVersions{ResourceManager: m, versions: map[string]map[string]bool{}}
}

// list keeps the groups in to, beside the built-in ones.
func (v *servedVersions) list(to discovery.GroupManager, builtIn []metav1.APIGroup) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.to, v.builtIn = to, map[string]bool{}
	for i := range builtIn {
		v.builtIn[builtIn[i].Name] = true
	}
	for group := range v.versions {
		v.show(group)
	}
}

// show brings the list up to date with a group. The caller holds v.mu.
func (v *servedVersions) show(group string) {
	switch {
	case v.to == nil || v.builtIn[group]:
	case len(v.versions[group]) == 0:
		delete(v.versions, group)
		v.to.RemoveGroup(group)
	default:
		names := slices.SortedFunc(maps.Keys(v.versions[group]), func(a, b string) int {
			return version.CompareKubeAwareVersionStrings(b, a)
		})
		v.to.AddGroup(apiGroup(group, names))
	}
}

// WithSource returns a manager of the source's versions. Those of custom resources
// are recorded in v.
func (v *servedVersions) WithSource(s aggregated.Source) aggregated.ResourceManager {
	m := v.ResourceManager.WithSource(s)
	if s != aggregated.CRDSource {
		return m
	}
	return customVersions{m, v}
}

// customVersions is the manager of the versions of custom resources.
type customVersions struct {
	aggregated.ResourceManager
	served *servedVersions
}

// AddGroupVersion adds or replaces a version of a group.
func (m customVersions) AddGroupVersion(group string, d apidiscoveryv2.APIVersionDiscovery) {
	m.ResourceManager.AddGroupVersion(group, d)
	v := m.served
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.versions[group] == nil {
		v.versions[group] = map[string]bool{}
	}
	if !v.versions[group][d.Version] {
		v.versions[group][d.Version] = true
		v.show(group)
	}
}

// RemoveGroupVersion removes a version of a group.
func (m customVersions) RemoveGroupVersion(gv metav1.GroupVersion) {
	m.ResourceManager.RemoveGroupVersion(gv)
	v := m.served
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.versions[gv.Group][gv.Version] {
		delete(v.versions[gv.Group], gv.Version)
		v.show(gv.Group)
	}
}

// RemoveGroup removes a group.
func (m customVersions) RemoveGroup(group string) {
	m.ResourceManager.RemoveGroup(group)
	v := m.served
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.versions[group] != nil {
		delete(v.versions, group)
		v.show(group)
	}
}

// apiGroup returns a group with its versions, the preferred one first.
func apiGroup(name string, versions []string) metav1.APIGroup {
	g := metav1.APIGroup{Name: name}
	for _, v := range versions {
		g.Versions = append(g.Versions, metav1.GroupVersionForDiscovery{GroupVersion: name + "/" + v, Version: v})
	}
	g.PreferredVersion = g.Versions[0]
	return g
}
