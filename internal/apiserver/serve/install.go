// Package serve adapts the generic server: it installs groups, serves discovery as kube-apiserver does, and shares
// requests fairly among clients.
package serve

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/component-base/compatibility"

	"github.com/fairlead/fairlead/internal/apiserver/watch"
	"github.com/fairlead/fairlead/internal/registry"
)

// Install serves resources, core/v1 under /api and the groups under /apis.
func Install(s *genericapiserver.GenericAPIServer, resources map[schema.GroupVersion]map[string]rest.Storage) error {
	var groups []*genericapiserver.APIGroupInfo
	for _, gv := range sortedVersions(resources) {
		info := genericapiserver.NewDefaultAPIGroupInfo(gv.Group, registry.Scheme, registry.ParameterCodec, registry.Codecs)
		info.NegotiatedSerializer = watch.WholeFrames{NegotiatedSerializer: info.NegotiatedSerializer}
		info.PrioritizedVersions = []schema.GroupVersion{gv}
		info.VersionedResourcesStorageMap[gv.Version] = resources[gv]
		if gv.Group == "" {
			if err := s.InstallLegacyAPIGroup(genericapiserver.DefaultLegacyAPIPrefix, &info); err != nil {
				return fmt.Errorf("cannot install %s: %w", gv, err)
			}
			continue
		}
		groups = append(groups, &info)
	}
	if len(groups) == 0 {
		return nil
	}
	if err := s.InstallAPIGroups(groups...); err != nil {
		return fmt.Errorf("cannot install the API groups: %w", err)
	}
	return nil
}

// sortedVersions returns the versions of r in order, the core group first.
func sortedVersions(r map[schema.GroupVersion]map[string]rest.Storage) []schema.GroupVersion {
	return slices.SortedFunc(maps.Keys(r), func(a, b schema.GroupVersion) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Version, b.Version))
	})
}

// NewVersion returns a Kubernetes version whose answer of /version has fairlead's version string.
func NewVersion(kubernetes, gitVersion string) compatibility.EffectiveVersion {
	return effectiveVersion{compatibility.NewEffectiveVersionFromString(kubernetes, "", ""), gitVersion}
}

// effectiveVersion reports fairlead's version string.
type effectiveVersion struct {
	compatibility.EffectiveVersion
	gitVersion string
}

// Info returns the answer of /version.
func (v effectiveVersion) Info() *version.Info {
	info := v.EffectiveVersion.Info()
	info.GitVersion, info.GitCommit, info.GitTreeState = v.gitVersion, "", ""
	return info
}
