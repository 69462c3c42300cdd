package podspec

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// APIReference returns the first field of s that refers to an object of the API, nil if
// there is none. Such a Pod cannot be static, nor the mirror of one (kube-apiserver's
// HasAPIObjectReference).
func APIReference(s *corev1.PodSpec) *field.Path {
	at := field.NewPath("spec")
	switch {
	case s.ServiceAccountName != "":
		return at.Child("serviceAccountName")
	case s.DeprecatedServiceAccount != "":
		return at.Child("serviceAccount")
	case len(s.ImagePullSecrets) > 0:
		return at.Child("imagePullSecrets")
	case len(s.ResourceClaims) > 0:
		return at.Child("resourceClaims")
	}
	for i := range s.Volumes {
		if at := volumeReference(&s.Volumes[i], at.Child("volumes").Index(i)); at != nil {
			return at
		}
	}
	for name, list := range map[string][]corev1.Container{"initContainers": s.InitContainers, "containers": s.Containers} {
		for i := range list {
			if at := containerReference(&list[i], at.Child(name).Index(i)); at != nil {
				return at
			}
		}
	}
	return nil
}

// volumeReference knows the volumes that refer to nothing: a new kind is one that may.
func volumeReference(v *corev1.Volume, at *field.Path) *field.Path {
	switch {
	case v.EmptyDir != nil, v.HostPath != nil, v.DownwardAPI != nil, v.Image != nil, v.VolumeSource == corev1.VolumeSource{}:
		return nil
	case v.Projected != nil:
		for i, p := range v.Projected.Sources {
			if p.DownwardAPI == nil {
				return at.Child("projected", "sources").Index(i)
			}
		}
		return nil
	}
	return at
}

func containerReference(c *corev1.Container, at *field.Path) *field.Path {
	for i, e := range c.Env {
		if f := e.ValueFrom; f != nil && (f.ConfigMapKeyRef != nil || f.SecretKeyRef != nil) {
			return at.Child("env").Index(i).Child("valueFrom")
		}
	}
	if len(c.EnvFrom) > 0 {
		return at.Child("envFrom").Index(0)
	}
	return nil
}

// IsSidecar reports whether an init container goes on running beside the others.
func IsSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}
