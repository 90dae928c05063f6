// Decodes Kubernetes recipes strictly into the types of their own APIs, and judges their pods by the "restricted" level of Pod
// Security, both with the code of the projects that own them. KServe's own resources are held against the schemas that KServe
// installs. An unknown field, a field in the wrong place and a quantity that is none are errors.
//
//	go run . FILE.yaml...
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	podsecurity "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	lwsv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: recipes FILE.yaml...")
		os.Exit(64)
	}
	failed := false
	for _, path := range os.Args[1:] {
		content, err := os.ReadFile(path)
		var said []string
		if err == nil {
			said, err = check(content)
		}
		for _, line := range said {
			fmt.Printf("%s: %s\n", path, line)
		}
		if err != nil {
			failed = true
			fmt.Fprintf(os.Stderr, "%s: %v\n", path, err)
		}
	}
	if failed {
		os.Exit(1)
	}
}

// check decodes every document of a file, and says what each is.
func check(content []byte) ([]string, error) {
	strict, err := decoder()
	if err != nil {
		return nil, err
	}
	judge, err := policy.NewEvaluator(policy.DefaultChecks())
	if err != nil {
		return nil, err
	}
	var said []string
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	for number := 1; ; number++ {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			if len(said) == 0 {
				return nil, errors.New("it has no document")
			}
			return said, nil
		}
		if err != nil {
			return said, fmt.Errorf("document %d: %w", number, err)
		}
		var pods []corev1.PodSpec
		kind, err := json.DefaultMetaFactory.Interpret(asJSON(document))
		if err != nil {
			return said, fmt.Errorf("document %d: %w", number, err)
		}
		if kind.Group == kserveGroup {
			pods, err = checkKServe(document, *kind)
		} else {
			var object runtime.Object
			if object, kind, err = strict.Decode(document, nil, nil); err == nil {
				pods = podsOf(object)
			}
		}
		if err != nil {
			return said, fmt.Errorf("document %d: %w", number, err)
		}
		line := kind.GroupVersion().String() + " " + kind.Kind
		for _, pod := range pods {
			told, err := restricted(judge, pod)
			if err != nil {
				return said, fmt.Errorf("document %d, %s: %w", number, kind.Kind, err)
			}
			line += ", " + told
		}
		said = append(said, line)
	}
}

// asJSON gives nothing for a document that is no YAML: the decoder then says so.
func asJSON(document []byte) []byte {
	content, err := utilyaml.ToJSON(document)
	if err != nil {
		return []byte("{}")
	}
	return content
}

func decoder() (runtime.Decoder, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, appsv1.AddToScheme, batchv1.AddToScheme,
		lwsv1.AddToScheme, networkingv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	options := json.SerializerOptions{Yaml: true, Strict: true}
	return json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, options), nil
}

// podsOf gives the pods that an object describes.
func podsOf(object runtime.Object) []corev1.PodSpec {
	switch it := object.(type) {
	case *corev1.Pod:
		return []corev1.PodSpec{it.Spec}
	case *appsv1.Deployment:
		return []corev1.PodSpec{it.Spec.Template.Spec}
	case *appsv1.StatefulSet:
		return []corev1.PodSpec{it.Spec.Template.Spec}
	case *appsv1.DaemonSet:
		return []corev1.PodSpec{it.Spec.Template.Spec}
	case *batchv1.Job:
		return []corev1.PodSpec{it.Spec.Template.Spec}
	case *lwsv1.LeaderWorkerSet:
		pods := []corev1.PodSpec{it.Spec.LeaderWorkerTemplate.WorkerTemplate.Spec}
		if leader := it.Spec.LeaderWorkerTemplate.LeaderTemplate; leader != nil {
			pods = append(pods, leader.Spec)
		}
		return pods
	}
	return nil
}

// restricted judges a pod by the level "restricted". Its hostPath volumes are left out, and named: a recipe for nodes needs
// them, and the level forbids them.
func restricted(judge policy.Evaluator, pod corev1.PodSpec) (string, error) {
	told := "restricted"
	var volumes []corev1.Volume
	for _, volume := range pod.Volumes {
		if volume.HostPath != nil {
			told = "restricted except for the hostPath " + volume.HostPath.Path
			continue
		}
		volumes = append(volumes, volume)
	}
	pod.Volumes = volumes
	level := podsecurity.LevelVersion{Level: podsecurity.LevelRestricted, Version: podsecurity.LatestVersion()}
	found := policy.AggregateCheckResults(judge.EvaluatePod(level, &metav1.ObjectMeta{}, &pod))
	if !found.Allowed {
		return "", fmt.Errorf("the level restricted forbids it: %s", found.ForbiddenDetail())
	}
	return told, nil
}
