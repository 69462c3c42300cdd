// Package secret stores Secrets.
package secret

import (
	"context"
	"encoding/json"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/fairlead/fairlead/internal/registry/store"
)

// NewStorage returns the storages of Secrets by resource path.
func NewStorage(opts generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	r, err := store.New(store.Kind{
		Resource: corev1.Resource("secrets"),
		Singular: "secret",
		New:      store.Empty[corev1.Secret],
		NewList:  store.Empty[corev1.SecretList],
		Strategy: store.Rules[*corev1.Secret]{Update: keepType, Validate: validateWrite}.Strategy(),
		Attrs:    attrs,
		Table: store.NewTable([]store.Column{
			{Name: "Type", Description: corev1.Secret{}.SwaggerDoc()["type"]},
			{Name: "Data", Description: corev1.Secret{}.SwaggerDoc()["data"]},
			store.AgeColumn(),
		}, func(s *corev1.Secret) []any {
			return []any{string(s.Type), int64(len(s.Data)), store.Age(s.CreationTimestamp)}
		}),
	}, opts)
	if err != nil {
		return nil, err
	}
	return map[string]rest.Storage{"secrets": r}, nil
}

// AddToScheme adds what the kind needs beyond its types.
func AddToScheme(s *runtime.Scheme) error {
	s.AddTypeDefaultingFunc(&corev1.Secret{}, func(obj any) { setDefaults(obj.(*corev1.Secret)) })
	return store.AddFieldLabels(s, corev1.SchemeGroupVersion.WithKind("Secret"), "type")
}

// setDefaults makes stringData, which is for writing only, part of data.
func setDefaults(s *corev1.Secret) {
	if s.Type == "" {
		s.Type = corev1.SecretTypeOpaque
	}
	if len(s.StringData) == 0 {
		return
	}
	if s.Data == nil {
		s.Data = map[string][]byte{}
	}
	for k, v := range s.StringData {
		s.Data[k] = []byte(v)
	}
	s.StringData = nil
}

func attrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	s := obj.(*corev1.Secret)
	return s.Labels, fields.Set{"metadata.name": s.Name, "metadata.namespace": s.Namespace, "type": string(s.Type)}, nil
}

// keepType keeps the type in an update that names none.
func keepType(s, before *corev1.Secret) {
	if s.Type == "" {
		s.Type = before.Type
	}
}

// validateWrite checks s as a replacement of before, nil on create.
func validateWrite(_ context.Context, s, before *corev1.Secret) field.ErrorList {
	if before == nil {
		return validate(s)
	}
	errs := store.ValidateMetaUpdate(&s.ObjectMeta, &before.ObjectMeta)
	errs = append(errs, validation.ValidateImmutableField(s.Type, before.Type, field.NewPath("type"))...)
	errs = append(errs, store.ValidateImmutable(s.Immutable, before.Immutable,
		store.DataField{Name: "data", Changed: !equality.Semantic.DeepEqual(s.Data, before.Data)})...)
	return append(errs, validate(s)...)
}

func validate(s *corev1.Secret) field.ErrorList {
	errs := store.ValidateMeta(&s.ObjectMeta, true, validation.NameIsDNSSubdomain)
	data := field.NewPath("data")
	bad, size := store.ValidateDataKeys(s.Data, data)
	errs = append(append(errs, bad...), store.ValidateDataSize(size, corev1.MaxSecretSize, data)...)
	return append(errs, validateType(s, data)...)
}

// validateType checks that the keys which a well-known type promises are there.
func validateType(s *corev1.Secret, data *field.Path) (errs field.ErrorList) {
	need := func(keys ...string) {
		for _, k := range keys {
			if _, ok := s.Data[k]; !ok {
				errs = append(errs, field.Required(data.Key(k), "a Secret of type "+string(s.Type)+" has it"))
			}
		}
	}
	isJSON := func(key string) {
		need(key)
		if v, ok := s.Data[key]; ok && !json.Valid(v) {
			errs = append(errs, field.Invalid(data.Key(key), "<secret contents redacted>", "must be JSON"))
		}
	}
	switch s.Type {
	case corev1.SecretTypeTLS:
		need(corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	case corev1.SecretTypeSSHAuth:
		need(corev1.SSHAuthPrivateKey)
	case corev1.SecretTypeDockercfg:
		isJSON(corev1.DockerConfigKey)
	case corev1.SecretTypeDockerConfigJson:
		isJSON(corev1.DockerConfigJsonKey)
	case corev1.SecretTypeBasicAuth:
		_, user := s.Data[corev1.BasicAuthUsernameKey]
		_, pass := s.Data[corev1.BasicAuthPasswordKey]
		if !user && !pass {
			need(corev1.BasicAuthUsernameKey, corev1.BasicAuthPasswordKey)
		}
	case corev1.SecretTypeServiceAccountToken:
		if s.Annotations[corev1.ServiceAccountNameKey] == "" {
			errs = append(errs, field.Required(field.NewPath("metadata", "annotations").Key(corev1.ServiceAccountNameKey), ""))
		}
	}
	return errs
}
