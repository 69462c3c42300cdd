package accounts

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/storage/names"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
)

// Names and values of Kubernetes, which clients rely on.
const (
	// DefaultAccount is the account of Pods that name none.
	DefaultAccount = "default"
	// RootConfigMap holds the authority's certificate in every namespace.
	RootConfigMap = "kube-root-ca.crt"
	// MountPath is where in a container its token is.
	MountPath = "/var/run/secrets/kubernetes.io/serviceaccount"

	volumePrefix = "kube-api-access-"
	// tokenSeconds is kube-apiserver's odd value, which identifies such tokens.
	tokenSeconds = int64(3607)
	// TokenLife is how long the token of a Pod is valid that names no other time, and how long a Pod may take to get the next.
	TokenLife  = time.Duration(tokenSeconds)*time.Second + 10*time.Minute
	volumeMode = int32(0o644)
)

// Admission sets the account of every new Pod and, unless the Pod or the account
// opts out, adds a volume with a token, the authority and the namespace.
type Admission struct {
	*admission.Handler
	Accounts corelisters.ServiceAccountLister
	Client   kubernetes.Interface
}

var (
	_ admission.MutationInterface   = (*Admission)(nil)
	_ admission.ValidationInterface = (*Admission)(nil)
)

// NewAdmission returns the plug-in.
func NewAdmission(accounts corelisters.ServiceAccountLister, client kubernetes.Interface) *Admission {
	return &Admission{Handler: admission.NewHandler(admission.Create), Accounts: accounts, Client: client}
}

func podOf(a admission.Attributes) *corev1.Pod {
	if r := a.GetResource(); r.Group != "" || r.Resource != "pods" || a.GetSubresource() != "" {
		return nil
	}
	p, _ := a.GetObject().(*corev1.Pod)
	return p
}

// isMirror reports whether p is a mirror Pod, which represents a static Pod of a
// kubelet.
func isMirror(p *corev1.Pod) bool {
	_, ok := p.Annotations[corev1.MirrorPodAnnotationKey]
	return ok
}

// Admit fills in account, pull secrets and the token's volume.
func (x *Admission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	p := podOf(a)
	if p == nil || isMirror(p) {
		return nil
	}
	if p.Spec.ServiceAccountName == "" {
		p.Spec.ServiceAccountName = DefaultAccount
	}
	p.Spec.DeprecatedServiceAccount = p.Spec.ServiceAccountName
	account, err := x.account(ctx, a.GetNamespace(), p.Spec.ServiceAccountName)
	if err != nil {
		return admission.NewForbidden(a, err)
	}
	if len(p.Spec.ImagePullSecrets) == 0 {
		p.Spec.ImagePullSecrets = slices.Clone(account.ImagePullSecrets)
	}
	automount := account.AutomountServiceAccountToken
	if p.Spec.AutomountServiceAccountToken != nil {
		automount = p.Spec.AutomountServiceAccountToken
	}
	if automount == nil || *automount {
		mountToken(&p.Spec)
	}
	return nil
}

// Validate checks the Pod as other plug-ins changed it.
func (x *Admission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	p := podOf(a)
	if p == nil {
		return nil
	}
	if !isMirror(p) {
		if _, err := x.account(ctx, a.GetNamespace(), p.Spec.ServiceAccountName); err != nil {
			return admission.NewForbidden(a, err)
		}
		return nil
	}
	if p.Spec.ServiceAccountName != "" {
		return admission.NewForbidden(a, errors.New("a mirror pod may not reference service accounts"))
	}
	for i := range p.Spec.Volumes {
		if p.Spec.Volumes[i].Projected == nil {
			continue
		}
		for _, s := range p.Spec.Volumes[i].Projected.Sources {
			if s.ServiceAccountToken != nil {
				return admission.NewForbidden(a, errors.New("a mirror pod may not use ServiceAccountToken volume projections"))
			}
		}
	}
	return nil
}

// account returns the account of a new Pod. It makes the account "default" if the
// Pod comes before Keeper has made it.
func (x *Admission) account(ctx context.Context, namespace, name string) (*corev1.ServiceAccount, error) {
	if account, err := x.Accounts.ServiceAccounts(namespace).Get(name); err == nil {
		return account, nil
	}
	api := x.Client.CoreV1().ServiceAccounts(namespace)
	account, err := api.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) && name == DefaultAccount {
		account, err = api.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			account, err = api.Get(ctx, name, metav1.GetOptions{})
		}
	}
	if err != nil {
		return nil, fmt.Errorf("error looking up service account %s/%s: %w", namespace, name, err)
	}
	return account, nil
}

// mountToken adds the volume and mounts it wherever nothing else is mounted.
func mountToken(s *corev1.PodSpec) {
	name := ""
	for i := range s.Volumes {
		if v := &s.Volumes[i]; len(v.Name) > len(volumePrefix) && v.Name[:len(volumePrefix)] == volumePrefix {
			name = v.Name // a copy of another Pod
		}
	}
	added := name != ""
	if !added {
		name = names.SimpleNameGenerator.GenerateName(volumePrefix)
	}
	used := false
	for _, list := range [][]corev1.Container{s.InitContainers, s.Containers} {
		for i := range list {
			if slices.ContainsFunc(list[i].VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == MountPath }) {
				continue
			}
			list[i].VolumeMounts = append(list[i].VolumeMounts, corev1.VolumeMount{Name: name, ReadOnly: true, MountPath: MountPath})
			used = true
		}
	}
	if used && !added {
		s.Volumes = append(s.Volumes, tokenVolume(name))
	}
}

func tokenVolume(name string) corev1.Volume {
	seconds, mode := tokenSeconds, volumeMode
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
		DefaultMode: &mode,
		Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: corev1.ServiceAccountTokenKey, ExpirationSeconds: &seconds}},
			{ConfigMap: &corev1.ConfigMapProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: RootConfigMap},
				Items:                []corev1.KeyToPath{{Key: corev1.ServiceAccountRootCAKey, Path: corev1.ServiceAccountRootCAKey}},
			}},
			{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{
				Path: corev1.ServiceAccountNamespaceKey, FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"},
			}}}},
		},
	}}}
}
