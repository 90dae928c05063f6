package main

import (
	"bytes"
	stdjson "encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

const (
	// KServe's types need 1,200 packages to compile. Its module has the schemas that it installs into a cluster, too: these are
	// taken out of it, as data, and an API server's own code judges by them.
	kserveModule = "github.com/kserve/kserve@v0.15.2"
	kserveGroup  = "serving.kserve.io"
)

// kserveSchema gives the schema of one of KServe's resources, out of the module that the Go proxy has.
func kserveSchema(kind schema.GroupVersionKind) (*apiextensions.JSONSchemaProps, error) {
	command := exec.Command("go", "mod", "download", "-json", kserveModule)
	command.Dir = os.TempDir() // in no module of ours
	said, err := command.Output()
	var module struct{ Dir, Error string }
	if decoded := stdjson.Unmarshal(said, &module); decoded != nil || module.Dir == "" {
		return nil, fmt.Errorf("%s cannot be downloaded: %s %v", kserveModule, module.Error, err)
	}
	name := fmt.Sprintf("%s_%ss.yaml", kind.Group, strings.ToLower(kind.Kind))
	content, err := os.ReadFile(filepath.Join(module.Dir, "config/crd/full", name))
	if err != nil {
		return nil, fmt.Errorf("no kind %q is registered by %s: %w", kind.Kind, kserveModule, err)
	}
	var definition apiextensionsv1.CustomResourceDefinition
	if err := yaml.Unmarshal(content, &definition); err != nil {
		return nil, err
	}
	for _, version := range definition.Spec.Versions {
		if version.Name == kind.Version && version.Schema != nil {
			var found apiextensions.JSONSchemaProps
			given := version.Schema.OpenAPIV3Schema
			return &found, apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(given, &found, nil)
		}
	}
	return nil, fmt.Errorf("%s has no version %s of %s", kserveModule, kind.Version, kind.Kind)
}

// checkKServe decodes one of KServe's resources as an API server does with strict field validation. It gives its pods.
func checkKServe(document []byte, kind schema.GroupVersionKind) ([]corev1.PodSpec, error) {
	props, err := kserveSchema(kind)
	if err != nil {
		return nil, err
	}
	structural, err := structuralschema.NewStructural(props)
	if err != nil {
		return nil, err
	}
	validator, _, err := validation.NewSchemaValidator(props)
	if err != nil {
		return nil, err
	}
	var object map[string]any
	if err := yaml.UnmarshalStrict(document, &object); err != nil {
		return nil, err
	}
	var resource struct {
		metav1.TypeMeta `json:",inline"`
		Metadata        metav1.ObjectMeta `json:"metadata"`
		Spec            struct {
			Container corev1.Container `json:"container"`
			Predictor corev1.PodSpec   `json:"predictor"`
		} `json:"spec"`
	}
	if metadata, err := stdjson.Marshal(object["metadata"]); err != nil {
		return nil, err
	} else if err := strictly(metadata, &metav1.ObjectMeta{}); err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	// Fields of the predictor that are KServe's own are none of a pod: the schema has them
	if err := yaml.Unmarshal(document, &resource); err != nil {
		return nil, err
	}
	if found := validation.ValidateCustomResource(nil, object, validator); len(found) > 0 {
		return nil, found.ToAggregate()
	}
	unknown := structuralschema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true}
	if paths := pruning.PruneWithOptions(object, structural, true, unknown); len(paths) > 0 {
		return nil, fmt.Errorf("unknown field %q", paths)
	}
	if kind.Kind == "ClusterStorageContainer" {
		return []corev1.PodSpec{{InitContainers: []corev1.Container{resource.Spec.Container}}}, nil
	}
	return []corev1.PodSpec{resource.Spec.Predictor}, nil
}

func strictly(content []byte, into any) error {
	decoder := stdjson.NewDecoder(bytes.NewReader(content))
	decoder.DisallowUnknownFields()
	return decoder.Decode(into)
}
